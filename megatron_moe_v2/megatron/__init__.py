"""This package under megatron-core's flex token dispatcher.

================= ======================================================================================
``install``       ``MoEFlexTokenDispatcher`` with the ``deepep`` backend runs on this package
``uninstall``     megatron-core as it was
``installed``     the layout that is installed, or None
``prepare``       build and warm up every buffer of a model before step 0
================= ======================================================================================

    from megatron_moe_v2.megatron import install, prepare

    install(layout="expert")    # before the model is built
    model = ...
    prepare(model)              # on all ranks, before step 0 or any capture

``python -m megatron_moe_v2.megatron pretrain_gpt.py ...`` runs a script with it installed.
"""

from __future__ import annotations

from .patch import install, installed, uninstall
from .prepare import prepare

__all__ = ["install", "installed", "prepare", "uninstall"]
