"""Tables and figures of the papers at a size that two CPU cores can train, beside the originals.

Importing it needs SciPy, an optional dependency.
"""

from .perplexities import PerplexityTable
from .preset import Preset
from .receptive_fields import FieldFigure
from .retrieval import RetrievalTable

CHI, VEISI = "Chi et al., 2023", "Veisi et al., 2025"
PRESETS: dict[str, Preset] = {
    "chi-table-1": PerplexityTable(CHI, "1", "ArXiv", 12),
    "chi-table-2": PerplexityTable(CHI, "2", "ArXiv", 12),
    "chi-table-5": PerplexityTable(CHI, "5", "ArXiv", 12, cache=2048),
    "qin-figure-6": FieldFigure(),
    "cable-table-2": RetrievalTable(),
    "cable-table-3": PerplexityTable(VEISI, "3", "FineWeb-Edu-10B", 6),
}

__all__ = ["PRESETS", "Preset"]
