"""Decision rules, and what they share: observations, estimators, the step-time model, profiles."""
