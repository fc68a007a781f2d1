from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from weft.core import run_config, toml
from weft.core.errors import ConfigError, LayoutError, Refusal
from weft.nn import build_hf_model
from weft.train import build, build_data, run_checks
from weft.train.lr_schedule import lr_factor

RUN = """
[model]
build = "weft.models:decoder"
dim = 32
[data]
build = "weft.data:stdlib"
seq_len = 16
[train]
batch = 8
steps = 20
[optimizer]
lr = 1e-3
"""


def write(tmp_path: Path, text: str = RUN, name: str = "small.toml") -> Path:
    path = tmp_path / name
    path.write_text(text)
    return path


def load(tmp_path: Path, text: str = RUN, **overrides: str) -> run_config.RunConfig:
    return run_config.load_run(
        write(tmp_path, text), {key.replace("__", "."): value for key, value in overrides.items()}
    )


# ---- reading -------------------------------------------------------------------------------------


def test_a_run_file_and_its_defaults(tmp_path: Path) -> None:
    run = load(tmp_path)
    assert run.model.build == "weft.models:decoder"
    assert run.model.arguments == {"dim": 32}
    assert run.data.arguments == {"seq_len": 16}
    assert str(run.layout.axes) == "dp1"
    assert (run.train.batch, run.train.accumulate, run.loss) == (8, 1, "weft.losses:next_token")
    assert (run.optimizer.name, run.optimizer.arguments) == ("adamw", {"lr": 1e-3})
    assert (run.output, run.folder) == ("runs/small", str(tmp_path))


@pytest.mark.parametrize(
    ("model", "data", "loss"),
    [
        ('hf = "config.json"', 'hf = "texts"', "next_token"),
        ('hf = "config.json"', 'chat = ["*.jsonl"]', "next_token"),
        ('hf = "config.json"', 'build = "mine:pairs"', "causal_lm"),
        ('hf = "config.json"', 'text = ["*.txt"]', "next_token"),
        ('hf = "config.json"', 'build = "weft.data:stdlib"', "next_token"),
        ('hf = "config.json"\nauto = "masked-lm"', 'build = "mine:pairs"', "next_token"),
        ('build = "mine:model"', 'build = "mine:pairs"', "next_token"),
    ],
)
def test_the_default_loss_takes_the_labels_that_the_data_has(
    tmp_path: Path, model: str, data: str, loss: str
) -> None:
    text = f"[model]\n{model}\n[data]\n{data}\n[train]\nbatch = 8\nsteps = 2\n"
    assert load(tmp_path, text).loss == f"weft.losses:{loss}"


def test_overrides_are_toml_values_or_else_text(tmp_path: Path) -> None:
    run = load(
        tmp_path,
        train__batch="16",
        train__decay="cosine",
        train__sync_batchnorm="false",
        model__inputs='["input_ids"]',
        optimizer__betas="[0.9, 0.95]",
        layout__axes="dp2.tp2",
        roles='{"blocks.*.up" = "column"}',
    )
    assert (run.train.batch, run.train.decay, run.train.sync_batchnorm) == (16, "cosine", False)
    assert run.model.inputs == ("input_ids",)
    assert run.optimizer.arguments["betas"] == [0.9, 0.95]
    assert str(run.layout.axes) == "dp2.tp2"
    assert run.roles == {"blocks.*.up": "column"}


def test_an_override_names_a_role_in_quotes(tmp_path: Path) -> None:
    run = run_config.load_run(write(tmp_path), {'roles."blocks.*.up"': "column"})
    assert run.roles == {"blocks.*.up": "column"}


def test_dump_and_load_are_inverse(tmp_path: Path) -> None:
    text = RUN.replace(
        "dim = 32",
        'dim = 32\nnames = ["a\\"\\u007f\\n", "ü€😀"]\nscale = {x = 1e-300, "y z" = [true]}',
    )
    text += (
        'betas = [0.9, 0.95]\nsince = 2020-01-02\n[roles]\n"blocks.*.up" = "column"\nhead = {kind ='
        ' "row"}\n'
    )
    run = load(tmp_path, text, train__clip="1.0", train__recompute="2", output="elsewhere/it")
    other = tmp_path / "runs" / "deep"
    other.mkdir(parents=True)
    again = run_config.load_run(write(other, toml.dump_toml(run), "run.toml"))
    assert again == run
    assert (again.folder, again.output) == (str(tmp_path), "elsewhere/it")
    assert type(again.train.clip) is float


@pytest.mark.parametrize(
    ("table", "name"),
    [
        ("[optimizer]", "adamw"),
        ('[optimizer]\nname = "lion"', "lion"),
        ('[optimizer]\nbuild = "torch.optim:Adadelta"', None),
        ('[optimizer]\nbuild = "torch.optim:SGD"\nupdates_each = "element"', None),
    ],
)
def test_an_optimizer_is_written_and_read_back(
    tmp_path: Path, table: str, name: str | None
) -> None:
    run = load(tmp_path, RUN.replace("[optimizer]", table))
    again = run_config.load_run(write(tmp_path, toml.dump_toml(run), "run.toml"))
    assert again == run == again.with_steps(20)
    assert again.with_steps(5).train.steps == 5
    assert again.optimizer.name == name
    build.build_optimizer(again)


# ---- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new", "field", "value", "says"),
    [
        ("steps = 20", "stesp = 20", "train.stesp", 20, 'did you mean "steps"?'),
        ("[train]", "[trian]", "trian", {"batch": 8, "steps": 20}, 'did you mean "train"?'),
        ("[optimizer]", "[precison]", "precison", {"lr": 1e-3}, 'did you mean "precision"?'),
        ("batch = 8", "batch = -4", "train.batch", -4, "must be greater than 0"),
        ("batch = 8", "batch = 0", "train.batch", 0, "samples per optimizer step, over all ranks"),
        ("batch = 8", 'batch = "8"', "train.batch", "8", "Write a whole number"),
        ("batch = 8", "batch = true", "train.batch", True, "is not a whole number"),
        ("batch = 8", "batch = 8.5", "train.batch", 8.5, "is not a whole number"),
        ("batch = 8\n", "", "train.batch", None, "Write batch in [train]"),
        ("batch = 8", "batch = 8\naccumulate = 3", "train.batch", 8, "multiple of 3"),
        ("batch = 8", "batch = 8\nwarmup = 21", "train.warmup", 21, "at most steps = 20"),
        ("batch = 8", "batch = 8\nclip = 0.0", "train.clip", 0.0, "must be greater than 0"),
        (
            "batch = 8",
            "batch = 8\nmin_lr_ratio = 1.5",
            "train.min_lr_ratio",
            1.5,
            "less than or equal to 1",
        ),
        (
            "batch = 8",
            'batch = 8\ndecay = "cosin"',
            "train.decay",
            "cosin",
            'did you mean "cosine"?',
        ),
        (
            "batch = 8",
            'batch = 8\nrecompute = "ful"',
            "train.recompute",
            "ful",
            'did you mean "full"?',
        ),
        ("batch = 8", "batch = 8\nrecompute = 0", "train.recompute", 0, "a number of blocks"),
        (
            "batch = 8",
            "batch = 8\nsync_batchnorm = 1",
            "train.sync_batchnorm",
            1,
            "Write true or false",
        ),
        ("dim = 32", 'dim = 32\nhf = "x"', "model", None, "give exactly one of build, hf"),
        ("dim = 32", "inputs = 3", "model.inputs", 3, "is not a list"),
        ("dim = 32", "inputs = [3]", "model.inputs", 3, "is not a text"),
        ("dim = 32", 'auto = "masked-lm"', "model.auto", "masked-lm", "only for Hugging Face"),
        (
            'build = "weft.data:stdlib"\n',
            "",
            "data",
            {"seq_len": 16},
            "Give exactly one of build, text, hf",
        ),
        ("[train]", "[layout]\naxes = 2\n[train]", "layout.axes", 2, 'as in "dp2.tp2"'),
        (
            "[train]",
            '[precision]\ncompute = "fp8"\n[train]',
            "precision.compute",
            "fp8",
            "one of fp32, bf16, fp16, fp64",
        ),
        (
            "[train]",
            "[checkpoint]\nkeep = 0\n[train]",
            "checkpoint.keep",
            0,
            "must be greater than 0",
        ),
        ("[model]", "output = 3\n[model]", "output", 3, "is not a text"),
    ],
)
def test_a_wrong_key_or_value_is_named(
    tmp_path: Path, old: str, new: str, field: str, value: object, says: str
) -> None:
    assert old in RUN
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, RUN.replace(old, new))
    assert caught.value.field == field
    if value is not None:
        assert caught.value.value == value
    assert says.lower() in str(caught.value).lower()


def test_a_table_that_is_no_table(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="train = 3: is not a table"):
        load(tmp_path, train="3")
    with pytest.raises(ConfigError, match="missing") as caught:
        load(tmp_path, RUN.split("[train]")[0])
    assert caught.value.field == "train"


def test_a_layout_that_does_not_parse(tmp_path: Path) -> None:
    with pytest.raises(LayoutError) as caught:
        load(tmp_path, layout__axes="dp2,tp2")
    assert (caught.value.field, caught.value.value) == ("layout.axes", "dp2,tp2")


def test_a_missing_file_and_bad_toml(tmp_path: Path) -> None:
    write(tmp_path)
    with pytest.raises(ConfigError, match=r'Did you mean "small\.toml"'):
        run_config.load_run(tmp_path / "smal.toml")
    with pytest.raises(ConfigError, match="no such file"):
        run_config.load_run(tmp_path / "nowhere" / "x.toml")
    with pytest.raises(ConfigError, match="cannot be read"):
        run_config.load_run(tmp_path)
    with pytest.raises(ConfigError, match="line 3"):
        run_config.load_run(write(tmp_path, "[model]\n\nbuild = oops\n", "bad.toml"))


@pytest.mark.parametrize(
    ("key", "says"), [("train..batch", "not a dotted key"), ("train.batch.x", "batch is a value")]
)
def test_an_override_of_no_key(tmp_path: Path, key: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        run_config.load_run(write(tmp_path), {key: "1"})
    assert caught.value.value == key


def test_an_override_sets_one_value_only(tmp_path: Path) -> None:
    run = run_config.load_run(write(tmp_path), {"train.prompt": "1\nsteps = 5"})
    assert (run.train.prompt, run.train.steps) == ("1\nsteps = 5", 20)


# ---- what a run names ----------------------------------------------------------------------------


def refused(run: run_config.RunConfig) -> Refusal:
    with pytest.raises(Refusal) as caught:
        run_checks.check_run(run)
    return caught.value


def test_a_run_is_built(tmp_path: Path) -> None:
    run = load(
        tmp_path,
        model__heads="2",
        data__max_bytes="200000",
        train__eval_every="5",
        layout__axes="dp2",
    )
    first, second = build.build_model(run), build.build_model(run)
    assert all(
        torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True)
    )
    other = build.build_model(run, seed=7, dtype=torch.float64)
    assert {p.dtype for p in other.parameters()} == {torch.float64}
    assert not torch.equal(next(other.parameters()), next(first.parameters()).double())
    assert {p.device.type for p in build.build_model(run, "meta").parameters()} == {"meta"}
    assert (
        len(build_data.build_dataset(run, "train")) > len(build_data.build_dataset(run, "val")) > 0
    )
    [plan] = run_checks.check_run(run)
    assert (str(plan.layout), plan.batch) == ("dp2", 8)
    made = build.build_optimizer(run)(list(first.named_parameters()))
    assert isinstance(made, torch.optim.AdamW)
    assert made.defaults["lr"] == 1e-3


def test_building_a_model_leaves_the_random_state_alone(tmp_path: Path) -> None:
    run = load(tmp_path, model__heads="2")
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    build.build_model(run)
    assert torch.equal(torch.rand(2), expected)


@pytest.mark.parametrize(
    ("key", "value", "field", "says"),
    [
        ("model.build", "weft.models:decode", "model.build", 'did you mean "decoder"?'),
        ("model.build", "nowhere_at_all:f", "model.build", "there is no module nowhere_at_all"),
        ("model.build", "weft.models", "model.build", "is not of the form package.module:callable"),
        ("model.build", "weft.core:STOPPED", "model.build", "cannot be called"),
        ("model.build", "builtins:dict", "model.build", "returns dict"),
        ("model.dmi", "3", "model.dmi", 'did you mean "dim"?'),
        ("model.heads", "3", "model", "must be a multiple of 2 * heads"),
        ("data.seq_length", "3", "data.seq_length", 'did you mean "seq_len"?'),
        ("data.seq_len", "0", "seq_len", "use 1 or more"),
        ("data.seq_len", "30000", "train.batch", "samples, fewer than one batch"),
        ("train.loss", "weft.losses:next_tokne", "train.loss", 'did you mean "next_token"?'),
        ("optimizer.name", "adamv", "optimizer.name", 'did you mean "adam'),
        ("optimizer.name", "lbfgs", "optimizer.name", "computes the loss several times"),
        ("optimizer.weigth_decay", "0.1", "optimizer.weigth_decay", 'did you mean "weight_decay"?'),
        ("optimizer.lr", "-1.0", "optimizer.lr", "adamw refuses: Invalid learning rate"),
        ("model.inputs", '["input_id"]', "model.inputs", 'did you mean "input_ids"?'),
        ("layout.axes", "dp3", "train.batch", "such as 9"),
        ("layout.axes", "dp2.xp2", "layout", "there is no axis 'xp'"),
    ],
)
def test_what_cannot_be_built_is_named(
    tmp_path: Path, key: str, value: str, field: str, says: str
) -> None:
    run = run_config.load_run(
        write(tmp_path, RUN + "\n[layout]\n"),
        {"model.heads": "2", "data.max_bytes": "100000", key: value},
    )
    error = refused(run)
    assert error.field == field
    assert says.lower() in str(error).lower()


def test_the_folder_of_the_run_file_is_importable(tmp_path: Path) -> None:
    (tmp_path / "mine_of_config_test.py").write_text(
        "import torch\n"
        "class Rows:\n"
        "    def __init__(self, rows): self.rows = rows\n"
        "    def __len__(self): return self.rows\n"
        "    def __getitem__(self, i): return {'x': torch.zeros(3), 'label': torch.tensor(0)}\n"
        "class Named(Rows):\n"
        "    def __getitem__(self, i): return {'input': torch.zeros(3), 'label': torch.tensor(0)}\n"
        "def model(width): return torch.nn.Linear(3, width)\n"
        "def numbers(width, depth):\n"
        "    assert [float(x) for x in torch.arange(0.0, depth)]\n"
        "    return torch.nn.Linear(3, width)\n"
        "number = 3\n"
        "def broken(): raise AttributeError('a fault of the model itself')\n"
    )
    text = (
        '[model]\nbuild = "mine_of_config_test:model"\nwidth = 2\ninputs = ["input"]\n'
        '[data]\nbuild = "mine_of_config_test:Rows"\nrows = 9\n[train]\nbatch = 8\nsteps = 2\n'
    )
    run = load(tmp_path, text)
    assert build.build_model(run)(torch.zeros(4, 3)).shape == (4, 2)
    assert "called with input, and a sample holds x, label" in str(refused(run))
    assert "model.width" in str(refused(load(tmp_path, text.replace("width = 2\n", ""))))
    assert "cannot be called" in str(
        refused(load(tmp_path, text, model__build="mine_of_config_test:number"))
    )
    named = {
        "data__build": "mine_of_config_test:Named",
        "train__loss": "weft.losses:classification",
    }
    assert "no split 'val'" in str(refused(load(tmp_path, text, train__eval_every="1", **named)))
    # numbers() computes with values while it is made, which the meta device has not
    made = build.build_skeleton(
        load(tmp_path, text, model__build="mine_of_config_test:numbers", model__depth="3")
    )
    assert next(made.parameters()).device.type == "cpu"
    with pytest.raises(ConfigError, match=r"fault of the model.*line \d+, in broken"):
        build.build_model(
            load(
                tmp_path, text.replace("width = 2\n", ""), model__build="mine_of_config_test:broken"
            )
        )


class Draws(TorchDispatchMode):
    """How many tensors are filled at random."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **(kwargs or {}))


def test_a_skeleton_draws_nothing(tmp_path: Path) -> None:
    run = load(tmp_path)
    with Draws() as bare:
        shapes = [p.shape for p in build.build_skeleton(run).parameters()]
    with Draws() as real:
        model = build.build_model(run)
    assert bare.count == 0 < real.count
    assert shapes == [p.shape for p in model.parameters()]


def test_a_module_that_fails_is_named(tmp_path: Path) -> None:
    (tmp_path / "fails_of_config_test.py").write_text("import not_there_at_all\n")
    error = refused(load(tmp_path, model__build="fails_of_config_test:f"))
    assert "imports not_there_at_all, which is not installed" in str(error)
    (tmp_path / "faulty_of_config_test.py").write_text("1 / 0\n")
    assert "ZeroDivisionError" in str(
        refused(load(tmp_path, model__build="faulty_of_config_test:f"))
    )


def test_text_is_found_beside_the_run_file(tmp_path: Path) -> None:
    (tmp_path / "corpus").mkdir()
    for i in range(3):
        (tmp_path / "corpus" / f"{i}.txt").write_text("weft and warp " * 200)
    text = RUN.replace('build = "weft.data:stdlib"', 'text = ["corpus/*.txt"]')
    assert len(build_data.build_dataset(load(tmp_path, text))) > 100
    error = refused(load(tmp_path, text, data__text='["corpus/*.md"]', model__heads="2"))
    assert (error.field, error.value) == ("text", "corpus/*.md")


# ---- Hugging Face --------------------------------------------------------------------------------

HF = """
[model]
hf = "tiny"
[data]
build = "weft.data:stdlib"
seq_len = 16
max_bytes = 100000
[train]
batch = 8
steps = 20
"""


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds a small Llama with its weights, `tiny`."""
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("hf")
    small = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        dtype="bfloat16",
    )
    torch.manual_seed(5)
    transformers.AutoModelForCausalLM.from_config(small, dtype=torch.float32).save_pretrained(
        folder / "tiny"
    )
    return folder


def test_a_model_directory_gives_its_weights(llama: Path) -> None:
    from safetensors.torch import load_file

    model = build.build_model(load(llama, HF))
    stored = load_file(llama / "tiny" / "model.safetensors")
    assert torch.equal(model.get_parameter("model.norm.weight"), stored["model.norm.weight"])
    assert torch.equal(model.get_parameter("lm_head.weight"), stored["lm_head.weight"])
    assert (model.config.use_cache, model.config._attn_implementation) == (False, "sdpa")
    assert next(model.parameters()).dtype == torch.float32
    assert len(run_checks.check_run(load(llama, HF))) == 1


def test_models_in_a_model_keep_no_keys_for_generation(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    transformers.Gemma3Config().save_pretrained(tmp_path)
    source, meta = str(tmp_path / "config.json"), torch.device("meta")
    config: Any = build_hf_model(source, {}, "image-text-to-text", meta).config
    assert (config.use_cache, config.text_config.use_cache) == (False, False)
    assert "use_cache" not in config.vision_config.to_dict()


def test_a_configuration_gives_fresh_weights_by_seed(llama: Path) -> None:
    run = load(llama, HF, model__hf="tiny/config.json", model__num_hidden_layers="2")
    first, second = build.build_model(run), build.build_model(run, seed=9)
    assert len(first.model.layers) == 2
    assert next(first.parameters()).dtype == torch.float32  # not the configuration's own bfloat16
    assert torch.equal(next(first.parameters()), next(build.build_model(run).parameters()))
    assert not torch.equal(next(first.parameters()), next(second.parameters()))


def test_another_head(llama: Path) -> None:
    run = load(llama, HF, model__auto="sequence-classification", model__num_labels="3")
    model = build.build_model(run)
    assert type(model).__name__ == "LlamaForSequenceClassification"
    assert model.score.out_features == 3


@pytest.mark.parametrize(
    ("key", "value", "field", "says"),
    [
        ("model.hidden_sizes", "8", "model.hidden_sizes", 'Did you mean "hidden_size"?'),
        ("model.dtype", "bf16", "model.dtype", "is not a known key of config.json"),
        ("model.hf", "meta-llama/Llama-3.1-8B", "model.hf", "nothing is downloaded"),
        ("model.hidden_size", "wide", "model.hf", "hidden_size"),
        ("model.num_hidden_layers", "2", "model.hf", "weights lack model.layers.1"),
        ("model.intermediate_size", "24", "model.hf", "other shapes than intermediate_size = 24"),
        ("model.auto", "causal", "model.auto", "causal-lm"),
    ],
)
def test_what_transformers_cannot_build(
    llama: Path, key: str, value: str, field: str, says: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        build.build_model(run_config.load_run(write(llama, HF), {key: value}))
    assert caught.value.field == field
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("written", "says"),
    [
        ({}, "it has no model_type"),
        ({"model_type": "lama"}, "no model_type 'lama'"),
        ({"model_type": "zzzzzzzzzzzz"}, "The nearest of "),
    ],
)
def test_a_kind_of_model_that_is_not_known(
    tmp_path: Path, written: dict[str, str], says: str
) -> None:
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").write_text(json.dumps(written))
    with pytest.raises(ConfigError) as caught:
        build.build_model(load(tmp_path, HF))
    assert says in str(caught.value) and len(str(caught.value)) < 200


def test_pickled_weights_are_not_read(llama: Path, tmp_path: Path) -> None:
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").write_bytes((llama / "tiny" / "config.json").read_bytes())
    (tmp_path / "tiny" / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ConfigError, match="pickled"):
        build.build_model(load(tmp_path, HF))


# ---- the schedule --------------------------------------------------------------------------------


def test_the_learning_rate_rises_and_falls(tmp_path: Path) -> None:
    factor = build.build_lr_factor(
        load(tmp_path, train__warmup="4", train__decay="cosine", train__min_lr_ratio="0.1")
    )
    values = [factor(step) for step in range(21)]
    assert values[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert all(a > b for a, b in itertools.pairwise(values[4:]))
    assert math.isclose(values[12], 0.1 + 0.9 / 2)
    assert math.isclose(values[20], 0.1)
    assert lr_factor(15, 20, warmup=10, decay="linear") == 0.5
    assert [lr_factor(step, 20) for step in (0, 19)] == [1.0, 1.0]
    assert lr_factor(5, 5, warmup=5, decay="linear") == 1.0


def test_layouts_are_parsed_once_and_written_as_text(tmp_path: Path) -> None:
    run = load(tmp_path, layout__axes="dp4.tp2", layout__elastic='["dp2.tp2", "tp2"]')
    assert run.layout.axes.size("dp") == 4
    assert isinstance(run.layout.elastic, tuple)
    assert [layout.world for layout in run.layout.elastic] == [4, 2]
    assert 'elastic = ["dp2.tp2", "tp2"]' in toml.dump_toml(run)
    assert run_config.RunConfig.model_validate(run.model_dump(exclude_none=True)) == run
