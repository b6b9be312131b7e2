"""What a decision log tells, on one page, and what other rules would have given as far as it can be known."""
