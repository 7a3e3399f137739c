import pytest

from automodel_c.models.processor import build_processor

VISION = {"patch_size": 8, "temporal_patch_size": 2, "spatial_merge_size": 2}


@pytest.fixture(scope="session")
def processor():
    return build_processor(VISION, words=["user", "assistant", "Which", " digit"], min_pixels=1024, max_pixels=1024)
