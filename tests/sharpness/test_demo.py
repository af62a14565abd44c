import torch
from torch.nn.functional import cross_entropy

from quotient_manifolds.symmetries import find_symmetric_pairs
from sharpness import demo


def test_the_digits_and_their_transformer():
    torch.set_default_dtype(torch.float32)
    x, y, _x_test, y_test = demo.digits(0)
    assert (len(y), len(y_test)) == (1437, 360)
    model = demo.vision_transformer()
    assert len(find_symmetric_pairs(model)) == 24
    assert model(x[:2]).logits.shape == (2, 10)
    # The loss that training lowers: after one epoch the accuracy is still that of chance.
    before = cross_entropy(demo._logits(model, x), y)
    demo.train(model, x, y, epochs=1, progress=False)
    assert cross_entropy(demo._logits(model, x), y) < before
