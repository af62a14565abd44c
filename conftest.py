"""Examples in docstrings run as a user's do: in single precision, whatever ran before; seeded."""

import atexit
import gc

import pytest

#: Tests that wait for processes forked from one that has imported everything: there is one such for all of them, and
#: they begin first, so that others use the cores in the meantime.
FORKING = (
    "test_second_device.py", "test_study_run.py", "test_sharded.py", "test_optim_sharded.py", "test_distributed.py",
    "test_plots.py",
)  # fmt: skip

#: The longest of the other files, which begin next: one that began last would keep all but one core idle.
LONG = (
    "test_docs.py", "test_logarithm.py", "test_evaluation.py", "test_manifolds.py", "test_complete.py",
    "test_points.py", "test_align.py", "test_generalization.py", "test_geodesics.py", "test_nullity.py",
    "test_optim.py", "test_fuzz.py", "test_newcomers.py", "test_examination.py", "test_handlers.py",
    "test_adapters.py", "test_measures.py", "test_parameters.py", "test_testing.py", "test_packaging.py",
    "test_examples.py", "test_restricted.py", "test_perturb.py", "test_means.py", "test_compare.py", "test_sameness.py",
    "test_verdicts.py", "test_pymanopt.py", "test_trainers.py", "test_spectra.py",
)  # fmt: skip
ORDER = {name: i - len(FORKING + LONG) for i, name in enumerate(FORKING + LONG)}


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Give each worker of pytest-xdist whole files, and those that fork to one: they share what was set up or imported.

    Marks of groups would do, if the two agreed on what a test is called (pytest-xdist 3.8 and pytest 9.2 do not).
    """
    from xdist.scheduler import LoadScopeScheduling

    class Files(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            file = nodeid.partition("::")[0]
            return "forking" if file.endswith(FORKING) else file

    return Files(config, log)


def pytest_collection_modifyitems(items):
    """Order the tests."""
    items.sort(key=lambda item: ORDER.get(item.path.name, 0))


gc.disable()  # while everything is imported, of which nothing is garbage


def pytest_collection_finish():
    """Exempt imported modules from garbage collection, which would otherwise traverse them again and again."""
    gc.collect()
    gc.freeze()
    gc.enable()
    atexit.register(gc.unfreeze)  # let libraries clean up, after pytest's own collections


@pytest.fixture(autouse=True)
def _as_a_user():
    import torch  # not by the process that only hands out tests to others

    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(before)
