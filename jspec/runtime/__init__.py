"""The decode loop: scheduling, the target's pass, policies of draft length, measurements."""
