"""Which drafts are kept: greedy, rejection sampling, and the sampling they rest on."""
