"""Import from and export to Hugging Face's format: the public names of ``huggingface_*.py``."""

from phalanx.checkpoint.interop.huggingface_config import (
    HuggingFaceError,
    Storage,
    UnsupportedModelError,
    hf_config_of,
    spec_of,
    storage_of,
)
from phalanx.checkpoint.interop.huggingface_export import export_hf, tensors_of, weight_files
from phalanx.checkpoint.interop.huggingface_import import Imported, import_hf
from phalanx.checkpoint.interop.huggingface_names import hf_name, parameter_name, published

__all__ = [
    "HuggingFaceError",
    "Imported",
    "Storage",
    "UnsupportedModelError",
    "export_hf",
    "hf_config_of",
    "hf_name",
    "import_hf",
    "parameter_name",
    "published",
    "spec_of",
    "storage_of",
    "tensors_of",
    "weight_files",
]
