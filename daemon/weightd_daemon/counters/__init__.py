"""What is counted of each model, over restarts of the daemon: how long, how many, and what befell its processes."""
