import automodel_c as amc
from automodel_c.diagnosis import report


def test_doctor_facts():
    facts = amc.doctor()
    assert facts["extension"] == amc.build_info()
    assert facts["packages"]["numpy"] and facts["cores"] >= 1
    assert facts["packages"]["automodel_c"] == amc.__version__


def test_report_says_what_is_missing_and_how_to_get_it():
    facts = amc.doctor()
    facts["packages"]["tqdm"] = None
    facts["extension"] = {**facts["extension"], "cuda": False}
    facts["gpus"] = [{"name": "NVIDIA H200", "memory": 139.8}]
    text = "\n".join(report(facts))
    assert "tqdm is missing: pip install" in text and "AM_CUDA=1" in text and "GPU NVIDIA H200, 140 GiB" in text
