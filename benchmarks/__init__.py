"""Speed, as ratios of two things measured in turn in one run; never a test."""
