"""Functions that a rank of the test pool runs, and what they share."""
