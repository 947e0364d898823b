"""The files around the code: what they promise must be so."""

import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import yaml

from ingest.config import IngestConfig

ROOT = Path(__file__).resolve().parent.parent
# The owners of ray and torch, and what stands on them. Every other module is core, new ones too.
SHELL = {
    "actor",
    "attention",
    "batch",
    "checkpoint",
    "cli",
    "cluster",
    "drain",
    "loader",
    "pipeline",
    "prefetch",
    "replay",
    "train",
}
CORE = sorted(path.stem for path in (ROOT / "ingest").glob("*.py") if path.stem not in SHELL | {"__init__"})


def in_new_process(code):
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("name", CORE)
def test_a_core_module_imports_neither_ray_nor_torch(name):
    done = in_new_process(f"import sys, ingest.{name}; print(sorted({{'ray', 'torch'}} & set(sys.modules)))")
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


def test_every_public_name_exists():
    code = "import ingest; print([name for name in getattr(ingest, '__all__', ()) if not hasattr(ingest, name)])"
    done = in_new_process(code)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


def annotated_tree(readme):
    """Paths of the first fenced block whose first line names a file in a folder and then says what it is for."""
    for block in re.findall(r"^```\w*\n(.*?)^```", readme, re.MULTILINE | re.DOTALL):
        if re.match(r"(ingest|jobs)/\S*\s+\S", block):
            return [line.split()[0] for line in block.splitlines() if re.match(r"(ingest|jobs)/\S*\s+\S", line)]
    return []


def test_the_tree_in_the_readme_lists_exactly_the_files_of_the_packages():
    files = [
        path.relative_to(ROOT).as_posix()
        for folder in ("ingest", "jobs")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in {".py", ".md"} and path.name != "__init__.py"
    ]
    listed = [path for path in annotated_tree((ROOT / "README.md").read_text()) if path[-1] != "/"]
    assert sorted(path for path in listed if not path.endswith("__init__.py")) == sorted(files)


def test_the_tree_is_found_behind_other_blocks_and_headings():
    readme = "```bash\nmake test\n```\n\n```\ningest/         the package\ningest/a.py     one\n\njobs/b.py  two\n```\n"
    assert annotated_tree(readme) == ["ingest/", "ingest/a.py", "jobs/b.py"]
    assert annotated_tree("no block") == []


def test_the_licence_is_the_whole_apache_text():
    text = (ROOT / "LICENSE").read_text()
    assert text.split()[:4] == ["Apache", "License", "Version", "2.0,"]
    assert "END OF TERMS AND CONDITIONS" in text
    assert text.rstrip().endswith("limitations under the License.")
    assert len(text.splitlines()) == 202


@pytest.mark.parametrize("target", ["train", "test", "check"])
def test_make_knows_its_targets(target):
    done = subprocess.run(["make", "--dry-run", target], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def cluster():
    return yaml.safe_load((ROOT / "cluster.yaml").read_text())


@pytest.mark.ray
def test_the_cluster_file_follows_the_schema_of_ray(cluster):
    from ray.autoscaler._private.util import prepare_config, validate_config

    whole = prepare_config(cluster)
    validate_config(whole)
    assert whole["available_node_types"]["head"]["max_workers"] == 0


@pytest.mark.ray
def test_the_schema_of_ray_refuses_a_misspelt_key(cluster):
    from jsonschema import ValidationError
    from ray.autoscaler._private.util import prepare_config, validate_config

    with pytest.raises(ValidationError, match="max_wrokers"):
        validate_config(prepare_config({**cluster, "max_wrokers": 3}))


def test_the_head_takes_no_work_and_the_pools_start_from_nothing(cluster):
    pools = cluster["available_node_types"]
    assert pools["head"]["resources"] == {"CPU": 0, "GPU": 0}
    assert [(name, pools[name]["min_workers"], pools[name]["max_workers"]) for name in ("tokenize", "train")] == [
        ("tokenize", 0, 8),
        ("train", 0, 4),
    ]
    assert cluster["max_workers"] == 12
    assert pools["tokenize"]["node_config"]["InstanceMarketOptions"] == {"MarketType": "spot"}
    assert pools["tokenize"]["resources"]["CPU"] > 0
    assert "GPU" not in pools["tokenize"]["resources"]
    assert "InstanceMarketOptions" not in pools["train"]["node_config"]
    assert pools["train"]["resources"]["GPU"] > 0


def test_the_cluster_opens_no_port_and_holds_no_credential(cluster):
    text = (ROOT / "cluster.yaml").read_text()
    assert cluster["provider"]["use_internal_ips"] is True
    assert "security_group" not in cluster["provider"]
    assert all(pool["node_config"]["SecurityGroupIds"] for pool in cluster["available_node_types"].values())
    assert "0.0.0.0" not in text
    assert "--dashboard-host=127.0.0.1" in text
    assert not re.search(r"AKIA[0-9A-Z]{16}|aws_secret|BEGIN [A-Z ]*PRIVATE KEY|(?i:password\s*:)", text)


def test_the_settings_in_the_readme_are_all_there_are_with_their_defaults():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    shown = yaml.safe_load(text.split("## Settings\n\n```yaml\n")[1].split("```")[0])
    config = IngestConfig.from_dict(shown)
    example = {"sources": shown["sources"], "tokenizer": {"path": "tokenizer.json"}, "epochs": 1}
    example["storage"] = {"endpoint": config.storage.endpoint, "region": config.storage.region}
    assert config == IngestConfig.from_dict(example)
    for name in ("storage", "tokenizer", "packing", "shuffle", "resources"):
        assert set(shown[name]) == {field.name for field in fields(getattr(config, name))}, name
    assert set(shown) == {field.name for field in fields(config)} - {"total_tokens"}
