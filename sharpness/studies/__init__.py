"""Studies: experiments that a person can run again."""
