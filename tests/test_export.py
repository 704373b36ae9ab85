"""From a run's workdir to files that peft and transformers read, with the same logits."""

import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx
from ml_collections import ConfigDict

import uirl_jax
from tests import tiny_config, tiny_model
from tools import export
from uirl_jax import assets, policy_sync
from uirl_jax.checkpoints import Checkpointer
from uirl_jax.config import reading
from uirl_jax.config.schema import RunConfig
from uirl_jax.errors import ModelError
from uirl_jax.families import loading
from uirl_jax.families.border import Model, TokenRows
from uirl_jax.families.chat_config import ChatConfig
from uirl_jax.families.table import family_of
from uirl_jax.learner import state as learner_state
from uirl_jax.models import weights
from uirl_jax.models.lora import LoraConfig, LoRAParam
from uirl_jax.run import open_run
from uirl_jax.store import open_store
from uirl_jax.store.files import new_directory
from uirl_jax.types import TaskSpec
from uirl_jax.verifiers.tasks import desktop

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")

IDS_BT = np.random.default_rng(0).integers(0, 256, (1, 12)).astype(np.int32)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> Path:
    return tiny_model.write(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def trained(model_dir):
    """(model with adapters as if trained, its logits)."""
    cfg = tiny_config.get_config().model.lora
    family = family_of(model_dir)
    model = loading.read_model(
        family,
        model_dir,
        family.read_config(model_dir),
        lora=LoraConfig(cfg.rank, cfg.alpha, cfg.targets),
        param_dtype=jnp.float32,
        init_key=jax.random.key(0),
    )
    rng = np.random.default_rng(3)
    adapters = nnx.state(model, LoRAParam)
    nnx.update(
        model,
        jax.tree.map(lambda x: jnp.asarray(0.1 * rng.normal(size=x.shape), x.dtype), adapters),
    )
    return model, logits(model)


def logits(model: Model) -> np.ndarray:
    positions_3bt = np.broadcast_to(np.arange(12, dtype=np.int32), (3, 1, 12))
    rows = TokenRows(IDS_BT, positions_3bt, np.ones_like(IDS_BT))
    x_btd = jax.jit(lambda model, rows: model.hidden(rows, None))(model, rows)
    return np.asarray(model.logits(x_btd))


def write_run(
    workdir: Path, model_dir: Path, model, chat: dict[str, str] | None = None, **changes
) -> Path:
    """What a learner leaves behind: config.json, a published policy."""
    cfg = tiny_config.get_config()
    if chat is not None:
        cfg.chat = ConfigDict(chat)
    cfg.model.path = str(model_dir)
    for name, value in changes.items():
        cfg.model[name] = value
    if changes.get("train") == "all":
        cfg.algorithm.loss.kl_coefficient = 0.0  # there is no base beside it
    run_id = open_run(workdir, reading.from_config(RunConfig, cfg))
    policy_sync.publish(
        open_store(workdir),
        version=3,
        step=3,
        arrays=weights.adapters_to_numpy(nnx.state(model, LoRAParam)),
        base_hash=weights.base_hash(model_dir),
        run_id=run_id,
        extra={},
    )
    return workdir


def run(*arguments: object) -> int:
    return export.main([str(argument) for argument in arguments])


def their_logits(reference) -> np.ndarray:
    import torch

    with torch.no_grad():
        return reference.eval()(input_ids=torch.tensor(IDS_BT).long()).logits.numpy()


def assert_same(got_btv, expected_btv, base_btv):
    largest = np.abs(expected_btv).max()
    assert np.abs(got_btv - expected_btv).max() < 1e-4 * largest
    assert np.abs(base_btv - expected_btv).max() > 0.05 * largest


def test_export_adapter_peft_gives_the_same_logits(tmp_path, model_dir, trained):
    peft = pytest.importorskip("peft")
    from transformers import Qwen2VLForConditionalGeneration

    model, expected_btv = trained
    workdir = write_run(tmp_path / "run", model_dir, model)
    assert run("adapter", f"--workdir={workdir}", f"--out={tmp_path / 'adapter'}") == 0
    reference = Qwen2VLForConditionalGeneration.from_pretrained(model_dir)
    base_btv = their_logits(reference)
    wrapped = peft.PeftModel.from_pretrained(reference, tmp_path / "adapter")
    assert_same(their_logits(wrapped), expected_btv, base_btv)

    # A run can start from it: the same logits, from the first step on.
    lora = LoraConfig(rank=16, alpha=32.0, targets=("attention", "mlp"), dropout=0.1)
    started = loading.load(model_dir, lora=lora, seed=5, adapter=tmp_path / "adapter")
    again = nnx.merge(started.graphdef, started.trainable, started.frozen)
    np.testing.assert_allclose(logits(again), expected_btv, atol=1e-5)
    assert started.base_hash == weights.base_hash(model_dir)


@pytest.mark.parametrize("writer", ["export", "peft"])
def test_adapter_of_another_base_is_refused(tmp_path, model_dir, trained, writer):
    """By the hash in our own file, or by the directory that PEFT's config names."""
    workdir = write_run(tmp_path / "run", model_dir, trained[0])
    assert run("adapter", f"--workdir={workdir}", f"--out={tmp_path / 'adapter'}") == 0
    if writer == "peft":
        file = tmp_path / "adapter" / "adapter_model.safetensors"
        safetensors.numpy.save_file(safetensors.numpy.load_file(file), file)  # without the hash
    other = tmp_path / "other"
    shutil.copytree(model_dir, other)
    tensors = safetensors.numpy.load_file(other / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"] * 1.5
    safetensors.numpy.save_file(tensors, other / "model.safetensors")
    lora = LoraConfig(rank=16, alpha=32.0, targets=("attention", "mlp"))
    said = r"adapter was trained on another base, '.*model\d*' \(hash .*the model is .*other"
    with pytest.raises(ModelError, match=said):
        loading.load(other, lora=lora, seed=0, adapter=tmp_path / "adapter")


@pytest.mark.parametrize("quantize", ["none", "int8"])
def test_export_merged_transformers_gives_the_same_logits(tmp_path, model_dir, trained, quantize):
    pytest.importorskip("torch")
    from transformers import Qwen2VLForConditionalGeneration

    model, expected_btv = trained
    # The frozen weights of the run were int8; what is merged are the original ones.
    workdir = write_run(tmp_path / "run", model_dir, model, quantize=quantize)
    assert run("merged", f"--workdir={workdir}", f"--out={tmp_path / 'merged'}") == 0
    reference, info = Qwen2VLForConditionalGeneration.from_pretrained(
        tmp_path / "merged", output_loading_info=True
    )
    assert not any(info.values()), info
    base = Qwen2VLForConditionalGeneration.from_pretrained(model_dir)
    assert_same(their_logits(reference), expected_btv, their_logits(base))
    for path in model_dir.iterdir():
        copied = tmp_path / "merged" / path.name
        assert copied.exists(), path.name
        unlike = (
            "model.safetensors",
            "config.json",
            "tokenizer_config.json",
            "chat_template.jinja",
        )
        if path.name not in unlike:
            assert copied.read_bytes() == path.read_bytes()


@pytest.mark.parametrize("kind", ["merged", "adapter"])
def test_exported_agent_knows_its_prompts_and_clicks_what_it_is_told(tmp_path, kind):
    """The README's way: a run, its export, `VLM`. The base solves a quarter of the instances."""
    base = "asset:tiny-ui-base"
    cfg = tiny_config.get_config()
    fresh = loading.load(base, lora=reading.from_config(RunConfig, cfg).model.lora, seed=0)
    model = nnx.merge(fresh.graphdef, fresh.trainable, fresh.frozen)
    chat = {"system_prompt": "", "prompt_template": "{instruction}"}
    workdir = write_run(tmp_path / "run", assets.find(base), model, chat=chat)
    out = tmp_path / "agent"
    assert run(kind, f"--workdir={workdir}", f"--out={out}") == 0
    if kind == "merged":
        vlm = uirl_jax.VLM.from_pretrained(out)
    else:
        vlm = uirl_jax.VLM.from_pretrained(assets.find(base), adapter=out)
    right = 0
    for seed in range(6):
        session = desktop.Session(TaskSpec("desktop/click_button", seed))
        said = vlm.predict_action(session.screenshot(), session.instruction)
        assert said.action is not None and said.action.kind == "click", said
        session.act(said.action)
        right += session.progress()["reward"] == 1.0
    assert right >= 1
    # What the facade writes knows them as well.
    vlm.save_adapter(tmp_path / "again")
    assert ChatConfig().completed(tmp_path / "again").prompt_template == "{instruction}"


def test_export_of_a_checkpoint_equals_that_of_its_policy(tmp_path, model_dir, trained, capsys):
    workdir = write_run(tmp_path / "run", model_dir, trained[0])
    cfg = export.read_run(workdir).learner
    optimizer = learner_state.make_optimizer(cfg.optimizer, cfg.steps)
    adapters = nnx.state(trained[0], LoRAParam)
    with Checkpointer(workdir / "checkpoints") as checkpointer:
        checkpointer.save(3, learner_state.init_state(adapters, optimizer), {})
    for source in ("policy", "checkpoint"):
        out = tmp_path / source
        assert run("adapter", f"--workdir={workdir}", f"--out={out}", f"--source={source}") == 0
    said = capsys.readouterr().out
    assert "policy version 3" in said and "checkpoint of step 3" in said
    written = [
        (tmp_path / source / "adapter_model.safetensors").read_bytes()
        for source in ("policy", "checkpoint")
    ]
    assert written[0] == written[1]


def test_export_of_the_best_is_what_best_json_names(tmp_path, model_dir, trained, capsys):
    workdir = write_run(tmp_path / "run", model_dir, trained[0])
    best = workdir / "best"
    assert run("adapter", f"--workdir={workdir}", f"--out={best / 'version_10'}") == 0
    # Of an evaluation that was killed before it removed the earlier one; as text it sorts last.
    shutil.copytree(best / "version_10", best / "version_9")
    file = best / "version_9" / "adapter_model.safetensors"
    zeros = {name: 0 * array for name, array in safetensors.numpy.load_file(file).items()}
    safetensors.numpy.save_file(zeros, file)
    for version, other in ((10, 9), (9, 10)):
        (best / "best.json").write_text(json.dumps({"version": version}))
        out = tmp_path / str(version)
        assert run("adapter", f"--workdir={workdir}", f"--out={out}", "--source=best") == 0
        assert f"best policy, version {version}," in capsys.readouterr().out
        written = safetensors.numpy.load_file(out / "adapter_model.safetensors")
        for folder, same in ((f"version_{version}", True), (f"version_{other}", False)):
            there = safetensors.numpy.load_file(best / folder / "adapter_model.safetensors")
            assert all(np.array_equal(written[name], there[name]) for name in there) == same


def test_best_model_of_a_run_that_trains_all_weights_is_exported(tmp_path, model_dir, trained):
    workdir = write_run(tmp_path / "run", model_dir, trained[0], train="all")
    model = loading.load(model_dir, lora=None, seed=0)
    doubled = jax.tree.map(lambda x: 2 * x, model.trainable)
    with new_directory(workdir / "best" / "version_9") as directory:
        loading.save_policy(model, directory, doubled, ChatConfig())
    (workdir / "best" / "best.json").write_text(json.dumps({"version": 9}))
    assert run("merged", f"--workdir={workdir}", f"--out={tmp_path / 'out'}", "--source=best") == 0
    found = loading.load(tmp_path / "out", lora=None, seed=0).trainable
    for ours, expected in zip(jax.tree.leaves(found), jax.tree.leaves(doubled), strict=True):
        np.testing.assert_array_equal(ours, expected)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "best.json: not found; an evaluation writes it"),
        ("{", "best.json: cannot be read (JSONDecodeError"),
        ("[]", "best.json: cannot be read (TypeError"),
        ('{"version": 7}', "best.json: names version 7, and there is no directory"),
        ('{"version": "7"}', "best.json: names version 7, and there is no directory"),
    ],
)
def test_export_without_a_best_is_one_line(tmp_path, model_dir, trained, capsys, content, message):
    workdir = write_run(tmp_path / "run", model_dir, trained[0])
    (workdir / "best" / "version_9").mkdir(parents=True)
    if content is not None:
        (workdir / "best" / "best.json").write_text(content)
    arguments = (f"--workdir={workdir}", f"--out={tmp_path / 'out'}", "--source=best")
    assert run("adapter", *arguments) == 1
    said = capsys.readouterr().err
    assert said.startswith("error: ") and said.count("\n") == 1 and message in said, said


def no_workdir(workdir, model_dir):
    shutil.rmtree(workdir)


def no_policy(workdir, model_dir):
    shutil.rmtree(workdir / "policy")


def damaged_policy(workdir, model_dir):
    path = workdir / "policy" / "3" / "adapters.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def another_base(workdir, model_dir):
    other = tiny_model.write(workdir.parent / "other", seed=1)
    replace_config(workdir, path=str(other))


def no_base(workdir, model_dir):
    replace_config(workdir, path="/nowhere")


def another_rank(workdir, model_dir):
    replace_config(workdir, lora={"rank": 8})


def unknown_target(workdir, model_dir):
    replace_config(workdir, lora={"targets": ["attention", "head"]})


def replace_config(workdir, **changes):
    path = workdir / "config.json"
    content = json.loads(path.read_text())
    content["config"]["model"] |= changes
    path.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (no_workdir, "no run's config"),
        (no_policy, "no policy is published yet"),
        (damaged_policy, "the file is damaged"),
        (another_base, "belongs to base model"),
        (no_base, "/nowhere: no model in Hugging Face's format"),
        (another_rank, "adapters do not fit the model"),
        (unknown_target, "'head' is unknown, expected some of ('attention', 'mlp'"),
    ],
)
def test_export_that_cannot_be_is_one_line(tmp_path, model_dir, trained, capsys, damage, message):
    workdir = write_run(tmp_path / "run", model_dir, trained[0])
    damage(workdir, model_dir)
    assert run("adapter", f"--workdir={workdir}", f"--out={tmp_path / 'out'}") == 1
    said = capsys.readouterr().err
    assert said.startswith("error: ") and said.count("\n") == 1 and message in said, said
    assert not (tmp_path / "out").exists()


def test_export_of_a_run_in_a_bucket_says_how_to_copy_it(tmp_path, capsys):
    assert run("adapter", "--workdir=gs://bucket/run1", f"--out={tmp_path / 'out'}") == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "rsync --recursive gs://bucket/run1 runs/copy" in said


def test_export_leaves_a_directory_that_is_there_alone(tmp_path, model_dir, trained, capsys):
    workdir = write_run(tmp_path / "run", model_dir, trained[0])
    assert run("adapter", f"--workdir={workdir}", f"--out={workdir}") == 1
    assert "is there already" in capsys.readouterr().err


def test_export_without_checkpoints_is_one_line(tmp_path, model_dir, trained, capsys):
    workdir = write_run(tmp_path / "run", model_dir, trained[0])
    arguments = (f"--workdir={workdir}", f"--out={tmp_path / 'out'}", "--source=checkpoint")
    assert run("adapter", *arguments) == 1
    assert "no checkpoint yet" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"rank": 8}, r"model\.lora\.rank=8, the adapter has 16"),
        ({"alpha": 16.0}, r"model\.lora\.alpha=16\.0, the adapter has 32\.0"),
        ({"rslora": True}, r"model\.lora\.rslora=True, the adapter has False"),
        ({"targets": ("mlp",)}, r"model\.lora\.targets=\('mlp',\), the adapter has"),
    ],
)
def test_load_with_an_adapter_of_another_shape_names_the_key(
    tmp_path, model_dir, trained, wrong, message
):
    workdir = write_run(tmp_path / "run", model_dir, trained[0])
    run("adapter", f"--workdir={workdir}", f"--out={tmp_path / 'adapter'}")
    lora = {"rank": 16, "alpha": 32.0, "targets": ("attention", "mlp")} | wrong
    with pytest.raises(ModelError, match=message) as error:
        loading.load(model_dir, lora=LoraConfig(**lora), seed=0, adapter=tmp_path / "adapter")
    assert "\n" not in str(error.value)
