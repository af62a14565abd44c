"""A model and batches by name, for runs in processes of their own."""

import os
import signal

import torch

from . import networks


def model():
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float32)
    return networks.Encoder()


def batches():
    return [networks.tokens(6, seed=i) for i in range(3)]


class Failing(networks.Encoder):
    """Ends in rank 1, at the eighth pass, as FAILURE says: by an error, or by a signal that no program survives."""

    passes = 0

    def forward(self, x):
        self.passes += 1
        if os.environ.get("RANK") == "1" and self.passes == 8:
            if os.environ["FAILURE"] == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("the eighth pass failed")
        return super().forward(x)


def failing():
    model()
    return Failing()
