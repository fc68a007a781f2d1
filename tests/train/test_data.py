from __future__ import annotations

import json
import sys
import sysconfig
import time
from itertools import chain, islice
from pathlib import Path

import numpy as np
import pytest
import torch

from weft.core.data_order import data_rank_indices
from weft.core.errors import DataError, LayoutError
from weft.train import data
from weft.train.tokenizer import END, Bytes, load_tokenizer, train_bpe

SENTENCES = [f"the cat number {i} sat on the mat, très content.\n" for i in range(60)]


@pytest.fixture
def corpus(tmp_path):
    for i, sentence in enumerate(SENTENCES):
        (tmp_path / f"{i:03}.txt").write_text(sentence * 3, encoding="utf-8")
    return str(tmp_path / "*.txt")


@pytest.fixture(scope="module")
def bpe(tmp_path_factory):
    path = tmp_path_factory.mktemp("bpe") / "tokenizer.json"
    train_bpe(SENTENCES, 300, path)
    return path


# ---- order and Loader ----------------------------------------------------------------------------


def test_part_as_in_the_picture():
    assert data_rank_indices(8, 2, 0, 2) == [0, 1, 4, 5]
    assert data_rank_indices(8, 2, 1, 2) == [2, 3, 6, 7]
    assert data_rank_indices(6, 1, 0, 1) == list(range(6))


@pytest.mark.parametrize("accumulate", [1, 2, 3])
@pytest.mark.parametrize("data_size", [1, 2, 4])
def test_parts_make_the_same_microbatches_on_every_layout(accumulate, data_size):
    batch = 24
    parts = [data_rank_indices(batch, accumulate, rank, data_size) for rank in range(data_size)]
    assert sorted(chain(*parts)) == list(range(batch))
    for micro in range(accumulate):
        size = batch // accumulate // data_size
        seen = [i for p in parts for i in p[micro * size : (micro + 1) * size]]
        assert seen == list(range(micro * batch // accumulate, (micro + 1) * batch // accumulate))


def test_a_batch_that_does_not_divide_is_refused():
    with pytest.raises(
        LayoutError, match=r"batch = 10: does not divide into 2 microbatches over 2 .*multiple of 4"
    ):
        data_rank_indices(10, 2, 0, 2)
    with pytest.raises(LayoutError):
        data.Loader(Numbers(50), 10, 0, accumulate=2, data_size=2)


class Numbers:
    """Sample i is the number i; remembers what was read."""

    def __init__(self, size):
        self.size, self.read = size, []

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        self.read.append(index)
        return {"x": torch.tensor(index)}


def take(steps, size=23, batch=8, **options):
    options = {"seed": 5, **options}
    return [
        step["x"].tolist() for step in islice(data.Loader(Numbers(size), batch, **options), steps)
    ]


def test_epochs_are_permutations_without_their_tail():
    steps = take(6)  # two steps to the epoch; 7 of 23 are left over
    epochs = [[*steps[i], *steps[i + 1]] for i in (0, 2, 4)]
    for epoch in epochs:
        assert len(set(epoch)) == 16 and set(epoch) < set(range(23))
    assert epochs[0] != epochs[1] != epochs[2]
    assert set().union(*epochs) == set(range(23))  # another tail is dropped each time
    assert steps == take(6) and steps != take(6, seed=6)
    assert take(3, shuffle=False) == [list(range(8)), list(range(8, 16)), list(range(8))]


def test_resume_is_exact_and_reads_nothing_twice():
    for start in (1, 2, 5):
        assert take(7)[start:] == take(7 - start, start=start)
    dataset = Numbers(23)
    loader = data.Loader(dataset, 8, seed=5, start=1000)
    next(loader)
    assert len(dataset.read) == 8 and loader.step == 1001


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("data_size", [2, 4])
def test_ranks_read_their_own_part_of_the_same_global_batch(data_size, accumulate):
    whole = take(5)
    for rank in range(data_size):
        dataset = Numbers(23)
        loader = data.Loader(
            dataset, 8, 5, accumulate=accumulate, data_rank=rank, data_size=data_size
        )
        mine = [next(loader)["x"].tolist() for _ in range(5)]
        assert mine == [
            [step[i] for i in data_rank_indices(8, accumulate, rank, data_size)] for step in whole
        ]
        assert dataset.read == list(chain(*mine))


def test_loader_refuses_what_it_cannot_batch():
    with pytest.raises(DataError, match="batch = 24: the dataset has 23 samples"):
        take(1, batch=24)
    assert len(take(1, batch=23)[0]) == 23
    with pytest.raises(DataError, match=r"data = 'x': one sample has shape \[2\], another \[3\]"):
        data.collate([{"x": torch.zeros(2)}, {"x": torch.zeros(3)}])
    with pytest.raises(DataError, match="'y'"):
        data.collate([{"x": torch.zeros(2)}, {"x": torch.zeros(2), "y": torch.zeros(1)}])
    with pytest.raises(DataError, match="no tensor"):
        data.collate([{"x": 1}, {"x": 2}])


# ---- text ----------------------------------------------------------------------------------------


def test_stdlib_is_there_quick_and_the_same():
    began = time.perf_counter()
    train, val = data.stdlib(seq_len=128), data.stdlib(seq_len=128, split="val")
    assert time.perf_counter() - began < 3  # about 0.2 s on an idle machine
    assert train.vocab == 256 and len(train) > 20_000 and len(val) > 500
    assert np.array_equal(train.tokens, data.stdlib(seq_len=128).tokens)
    assert "import" in train.decode(train.tokens[:100_000])
    sample = train[7]
    assert sample["input_ids"].shape == sample["labels"].shape == (128,)
    assert sample["input_ids"].dtype == sample["labels"].dtype == torch.int64
    assert torch.equal(sample["input_ids"][1:], sample["labels"][:-1])
    assert sample["labels"][-1] == train[8]["input_ids"][0]
    assert train[len(train) - 1]["labels"].shape == (128,)
    with pytest.raises(IndexError):
        train[len(train)]


def test_stdlib_takes_what_it_is_told():
    whole, part_of = data.stdlib(64), data.stdlib(64, max_bytes=100_000)
    val = data.stdlib(64, split="val", max_bytes=100_000)
    assert len(part_of.tokens) + len(val.tokens) == 100_000
    assert len(whole.tokens) > 3_000_000
    root = Path(sysconfig.get_path("stdlib"))
    source = (root / "json" / "decoder.py").read_bytes()
    one = data.stdlib(64, files=["json/decoder.py"])
    val = data.stdlib(64, split="val", files=["json/decoder.py"])
    assert bytes(one.tokens) + bytes(val.tokens) == source
    with pytest.raises(DataError, match="no source file"):
        data.stdlib(64, files=["*.txt"])


def test_held_out_files_are_not_trained_on(corpus):
    train, val = data.text(corpus, 8), data.text(corpus, 8, split="val")
    assert bytes(train.tokens).decode().count("number 19 ") == 0
    assert bytes(val.tokens).decode() == "".join(SENTENCES[i] * 3 for i in (19, 39, 59))
    assert len(train.tokens) + len(val.tokens) == sum(3 * len(s.encode()) for s in SENTENCES)
    with pytest.raises(DataError, match=r"split = 'vall'.*val"):
        data.text(corpus, 8, split="vall")


def test_one_file_is_split_at_its_end(tmp_path):
    (tmp_path / "a").write_bytes(bytes(range(200)))
    train, val = (data.text(str(tmp_path / "a"), 4, split) for split in ("train", "val"))
    assert bytes(train.tokens) + bytes(val.tokens) == bytes(range(200)) and len(val.tokens) == 10
    assert len(data.text(str(tmp_path / "a"), 10)) == 18  # the 190th byte has no next one


def test_bytes_round_trip():
    coder = Bytes()
    assert coder.decode(coder.encode("être 猫")) == "être 猫" and max(coder.encode("être 猫")) < 256
    assert coder.decode([0xC3]) == "\N{REPLACEMENT CHARACTER}"  # cut inside a character


def test_bpe_round_trip(bpe):
    coder = load_tokenizer(bpe)
    ids = coder.encode(SENTENCES[3])
    assert coder.vocab == 300 and max(ids) < 300 and len(ids) < len(SENTENCES[3].encode()) / 2
    assert coder.decode(ids) == SENTENCES[3]
    assert coder.decode(coder.encode("never seen: 猫")) == "never seen: 猫"
    assert list(coder.encode_all(iter(SENTENCES * 20))) == [coder.encode(s) for s in SENTENCES] * 20
    assert len(coder.encode(END)) == 1
    assert load_tokenizer(bpe.parent).encode("the cat") == coder.encode("the cat")


def test_a_tokenizer_directory_of_transformers(bpe, tmp_path):
    transformers = pytest.importorskip("transformers")
    transformers.PreTrainedTokenizerFast(tokenizer_file=str(bpe)).save_pretrained(tmp_path)
    assert load_tokenizer(tmp_path).encode(SENTENCES[0]) == load_tokenizer(bpe).encode(SENTENCES[0])
    # A slow format without tokenizer.json, as GPT-2's own: transformers builds the fast one.
    model = json.loads(bpe.read_text())["model"]
    folder = tmp_path / "gpt2"
    folder.mkdir()
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
    (folder / "merges.txt").write_text(
        "\n".join(["#version: 0.2", *(" ".join(m) for m in model["merges"])])
    )
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"}))
    assert load_tokenizer(folder).encode(SENTENCES[0]) == load_tokenizer(bpe).encode(SENTENCES[0])


def test_text_with_a_tokenizer(corpus, bpe):
    train = data.text([corpus], 8, tokenizer=bpe)
    assert train.vocab == 300
    assert train.decode(train.tokens) == "".join(
        s * 3 for i, s in enumerate(SENTENCES) if i % 20 != 19
    )
    assert train.encode("the cat") == load_tokenizer(bpe).encode("the cat")


def test_text_that_is_not_there(tmp_path, corpus):
    with pytest.raises(DataError, match="no file matches"):
        data.text([corpus, str(tmp_path / "no*.md")], 8)
    with pytest.raises(DataError, match="one sample takes 100001"):
        data.text(corpus, 100_000)
    with pytest.raises(DataError, match="seq_len = 0"):
        data.text(corpus, 0)
    with pytest.raises(DataError, match="does not exist"):
        data.text(corpus, 8, tokenizer=tmp_path / "tokenizer.json")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match="cannot be read"):
        data.text(corpus, 8, tokenizer=tmp_path / "tokenizer.json")
    with pytest.raises(DataError, match="vocab = 256"):
        train_bpe(SENTENCES, 256, tmp_path / "t.json")


def test_bpe_from_files(corpus, tmp_path, bpe):
    again = tmp_path / "made" / "tokenizer.json"
    train_bpe((Path(p) for p in sorted(Path(corpus).parent.glob("*.txt"))), 300, again)
    assert load_tokenizer(again).decode(load_tokenizer(again).encode(SENTENCES[0])) == SENTENCES[0]


def test_hugging_face_dataset_on_disk(tmp_path, bpe):
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    plain = datasets.Dataset.from_dict({"text": SENTENCES, "number": list(range(60))})
    plain.save_to_disk(tmp_path / "plain")
    train = data.hf(tmp_path / "plain", 8, tokenizer=bpe, end=END)
    assert train.vocab == 300
    assert train.decode(train.tokens) == "".join(
        s + END for i, s in enumerate(SENTENCES) if i % 20 != 19
    )
    val = data.hf(tmp_path / "plain", 8, "val")
    assert (
        val.vocab == 256 and val.decode(val.tokens) == SENTENCES[19] + SENTENCES[39] + SENTENCES[59]
    )

    both = datasets.DatasetDict({"train": plain, "validation": plain.select([0, 1])})
    both.save_to_disk(tmp_path / "both")
    val = data.hf(tmp_path / "both", 8, "val", bpe)
    assert val.decode(val.tokens) == SENTENCES[0] + SENTENCES[1]
    assert len(data.hf(tmp_path / "both", 8).tokens) == sum(len(s.encode()) for s in SENTENCES)

    datasets.DatasetDict({"train": plain}).save_to_disk(tmp_path / "single")
    with pytest.raises(DataError, match="has no split for 'val'"):
        data.hf(tmp_path / "single", 8, "val")
    with pytest.raises(DataError, match="is not a directory"):
        data.hf(tmp_path / "nothing", 8)
    with pytest.raises(DataError, match="cannot be read"):
        data.hf(tmp_path, 8)
    with pytest.raises(DataError, match=r"column = 'txt'.*[Dd]id you mean .text."):
        data.hf(tmp_path / "plain", 8, column="txt")
    with pytest.raises(DataError, match="column = 'number'"):
        data.hf(tmp_path / "plain", 8, column="number")
    with pytest.raises(DataError, match="end = 'stop here'"):
        data.hf(tmp_path / "plain", 8, tokenizer=bpe, end="stop here")


def test_without_the_extra_it_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(
        DataError, match=r'needs the package datasets. Install it: pip install "weft\[hf\]"'
    ):
        data.hf(tmp_path, 8)


# ---- images --------------------------------------------------------------------------------------


def test_shapes():
    train, again, val = data.shapes(), data.shapes(), data.shapes(split="val")
    assert len(train) == len(val) == 2000 and len(train.names) == 4
    sample = train[3]
    assert sample["image"].shape == (1, 16, 16) and sample["image"].dtype == torch.float32
    assert sample["label"].shape == () and sample["label"].dtype == torch.int64
    assert torch.equal(train.images, again.images) and not torch.equal(train.images, val.images)
    assert not torch.equal(train.images, data.shapes(seed=1).images)
    assert torch.bincount(train.labels).min() > 400
    clean = data.shapes(noise=0.0, classes=6, image=24)
    assert set(clean.images.unique().tolist()) == {0.0, 1.0}
    edges = torch.cat(
        [
            clean.images[..., 0, :],
            clean.images[..., -1, :],
            clean.images[..., 0],
            clean.images[..., -1],
        ]
    )
    assert edges.mean() < 0.02  # shapes lie inside their image
    filled = [clean.images[clean.labels == i].mean().item() for i in range(6)]
    assert min(filled) > 0.05 and len({round(f, 3) for f in filled}) == 6
    with pytest.raises(DataError, match="classes = 7"):
        data.shapes(classes=7)
    with pytest.raises(DataError, match="image = 4"):
        data.shapes(image=4)


def test_shapes_can_be_learned():
    from weft.nn.losses import classification
    from weft.nn.models import convnet

    torch.manual_seed(0)
    model = convnet(channels=8, classes=4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for batch in islice(data.Loader(data.shapes(), 64, seed=0), 80):
        total, weight = classification(model(batch["image"]), batch)
        optimizer.zero_grad()
        (total / weight).backward()
        optimizer.step()
    val = data.shapes(split="val", size=400)
    right = (model.eval()(val.images).argmax(dim=1) == val.labels).float().mean()
    assert right > 0.8
