import torch

from quotient_manifolds.symmetries import find_symmetric_pairs
from sharpness import demo


def test_the_demo_learns_the_digits():
    torch.set_default_dtype(torch.float32)
    torch.manual_seed(0)
    x, y, x_test, y_test = demo.digits(0)
    assert (len(y), len(y_test)) == (1437, 360)
    model = demo.vision_transformer()
    demo.train(model, x, y, epochs=18, progress=False)
    assert demo._accuracy(model, x_test, y_test) > 0.85
    assert len(find_symmetric_pairs(model)) == 24
