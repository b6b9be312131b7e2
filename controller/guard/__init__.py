"""What stands between a policy and its engine: refusals, alarms, fallback; ``guard.py`` orders them."""
