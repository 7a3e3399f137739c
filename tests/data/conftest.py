import pytest

from automodel_c.models.processor import build_processor

VISION = {"patch_size": 8, "temporal_patch_size": 2, "spatial_merge_size": 2}


@pytest.fixture(scope="session")
def processor():
    words = ["user", "assistant", "Which", " digit", " seconds"]
    video = {"size": {"shortest_edge": 1024, "longest_edge": 32768}}
    return build_processor(VISION, words=words, min_pixels=1024, max_pixels=1024, video=video)
