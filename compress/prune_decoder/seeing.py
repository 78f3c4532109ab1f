"""The decoder of one that sees as what pruning takes: it gets smaller, and what it sees with stays as it is."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from penjing.compress.prune.surgery import Cut
from penjing.compress.prune_decoder.subject import EMBEDDING, DecoderSubject
from penjing.core.checkpoint.vision_language import load_vision_language, save_vision_language
from penjing.core.vision.projector import linears
from penjing.core.vision.vision_language import VisionLanguage


class SeeingSubject(DecoderSubject):
    """See `DecoderSubject`. Where the residual stream gets narrower, the last layer of the projection does with it."""

    @torch.no_grad()
    def write(self, partial: Path, config: Any, cuts: Mapping[str, Cut], created_by: dict[str, Any]) -> None:
        """See `Subject`; all tensors in float32."""
        whole = load_vision_language(self.folder)
        model = VisionLanguage(whole.config.model_copy(update={"decoder": config}))
        model.vision.load_state_dict(whole.vision.state_dict())
        projector = whole.projector
        if EMBEDDING in cuts:
            _, last = linears(projector)[-1]
            last.weight = nn.Parameter(cuts[EMBEDDING].of(last.weight.T.contiguous()).T.contiguous())
            if last.bias is not None:
                last.bias = nn.Parameter(cuts[EMBEDDING].of(last.bias[None])[0])
        model.projector.load_state_dict(projector.state_dict())
        for name, tensor in self.smaller(config, cuts):
            model.decoder.get_parameter(name).copy_(tensor)
        model.decoder.tie_weights()
        save_vision_language(partial, model.config, model, self.folder, created_by)
