"""The generators and scorers of the library reasoning-gym, one domain for each of its datasets."""
