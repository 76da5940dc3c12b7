"""What runs in the dispatcher's process between a claim and its settlement."""
