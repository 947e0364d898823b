"""A notebook, run by a real kernel: the loader starts what it needs and says nothing unasked."""

import nbformat
import psutil
import pytest
from nbclient import NotebookClient

from ingest.config import IngestConfig
from tests.conftest import ROOT, steps_without_ray, texts, until, write_config, write_corpus

CELLS = """
import ingest
config = ingest.IngestConfig.from_yaml(PATH)
loader = ingest.Loader(config)

for batch in loader:
    print(batch.position.step, tuple(batch.input_ids.shape), batch.position.digest)
    if batch.position.step == 3:
        break

import ray
print(ray.is_initialized())

for batch in loader:
    print(batch.position.step, batch.position.digest)
    if batch.position.step == 5:
        break
state = loader.state_dict()

with ingest.Loader(config) as second:
    second.load_state_dict(state)
    for batch in second:
        pass
    print(second.position.step, second.position.digest)

import os
print(os.getpid())
"""


@pytest.mark.ray
@pytest.mark.timeout(400)
def test_a_notebook_breaks_off_goes_on_and_resumes_without_a_word_of_its_own(
    no_ray, tokenizer_file, tmp_path, monkeypatch
):
    write_corpus(tmp_path / "corpus", texts(80, seed=9), files=3)
    path = write_config(
        tmp_path / "run.yaml",
        tokenizer={"path": str(tokenizer_file), "backend": "tokenizers"},
        shuffle={"window_tokens": 1500},
    )
    positions = [step.position for step in steps_without_ray(IngestConfig.from_yaml(path))]
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("RAY_ADDRESS", "local")
    cells = CELLS.strip().replace("PATH", repr(str(path))).split("\n\n")
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    NotebookClient(notebook, timeout=120, kernel_name="python3", resources={"metadata": {"path": tmp_path}}).execute()

    said = []
    for cell in notebook.cells:
        assert [output for output in cell.outputs if output.get("name") != "stdout"] == []
        said.append("".join(output.text for output in cell.outputs).splitlines())
    first, second, last = positions[:3], positions[3:5], positions[-1]
    assert said[0] == []
    assert said[1] == [f"{position.step} (8, 16) {position.digest}" for position in first]
    assert said[2] == ["True"]
    assert said[3] == [f"{position.step} {position.digest}" for position in second]
    assert said[4] == [f"{last.step} {last.digest}"]
    [kernel] = map(int, said[5])
    until(lambda: not psutil.pid_exists(kernel), 10, "the kernel has ended")
