"""Verification of drafts: greedy, rejection sampling, and seeded sampling from the target."""
