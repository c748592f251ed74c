"""Where ranks meet: free ports, and which addresses of the first node the others reach."""
