"""What tests share and is no test: fakes, named for what they fake, and the worlds that tests stand in."""
