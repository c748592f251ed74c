"""Is every hang seen, proved, named and answered, and is every innocent left alone?"""
