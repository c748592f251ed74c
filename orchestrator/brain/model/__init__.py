"""What the brain hears, decides and knows: events, decisions, facts, deadlines."""
