"""The decode loop: scheduling, the target's pass, draft length policies, benchmarks, replay."""
