"""What helps tests: small networks, oracles, worlds to run in."""
