"""Datasets that run files and scripts name: `build = "weft.data:stdlib"`. They are defined in
`weft/train/data.py`."""

from weft.train import Dataset, Images, Loader, Text, collate, hf, shapes, stdlib, text

__all__ = ["Dataset", "Images", "Loader", "Text", "collate", "hf", "shapes", "stdlib", "text"]
