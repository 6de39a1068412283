"""What a bundle gives to other software: adapters, a plain checkpoint, an ONNX file."""

from massmerge.model.export.parts import Exported
from massmerge.model.export.run import FORMS, export_bundle

__all__ = ["FORMS", "Exported", "export_bundle"]
