"""Base class of workloads with experts: mesh, optimizer, logged hyperparameters and statistics of the MoE layers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol, cast

import torch
from torch import nn

from mlhpc.suite.config import RunConfig
from mlhpc.suite.errors import InputError
from mlhpc.suite.plugins import load_offload
from mlhpc.suite.training.step_timing import CudaClock, HostClock
from mlhpc.suite.workload import ChooserProtocol, ExpertLayer, Optimization, Workload
from mlhpc.suite.world import World
from mlhpc.workloads.moe.autotune import Autotuner
from mlhpc.workloads.moe.backend_selection import ExpertShape, choose_backend
from mlhpc.workloads.moe.config import Layout, Training
from mlhpc.workloads.moe.layer import KEEPER, MoELayer
from mlhpc.workloads.moe.mesh import DryRunGroup, ExpertMesh, make_dry_run_mesh
from mlhpc.workloads.moe.parallel import (
    MoEMonitor,
    count_node_ranks,
    find_expert_copy,
    list_expert_parameters,
    locate_expert_shares,
    make_expert_mesh,
    run_autotuner,
)
from mlhpc.workloads.moe.schedule import learning_rate


class HasMoELayers(Protocol):
    """A model that lists its MoE layers."""

    def moe_layers(self) -> Mapping[str, MoELayer]:
        """Return the MoE layers by name, in order."""
        ...


class MoEWorkload(Workload):
    """Base of workloads whose hyperparameters are a `Training`."""

    def __init__(self, config: RunConfig, training: Training) -> None:
        self.config = config
        self._training = training
        self._monitor: MoEMonitor | None = None
        self._tuner: Autotuner | None = None
        self._keeper: Any = None  # `Keeper` of the wing offload
        self.offloads = training.moe.offload is not None
        self.layout = self._layout(1)

    def mesh(self, world: World) -> ExpertMesh | None:
        """Create the mesh that shares the experts. None if every rank holds all. InputError if they cannot be divided.

        It has as many ranks as the plan says (`spread`), else all ranks with ``expert_parallel``.
        """
        moe, spread = self._training.moe, self.spread
        # a note means a rehearsal: it stands for ranks that do not exist
        size = world.size if spread.note is None else spread.size
        self.layout = self._layout(size // spread.sharing)
        if moe.expert_parallel and spread.sharing > 1 and not spread.ranks and not self._training.dense:
            raise InputError("ranks share samples, and experts are spread over all ranks: add expert=N to --mesh")
        ranks = spread.ranks or (size if moe.expert_parallel else 1)
        if self._training.dense or ranks == 1:
            return None
        if spread.note is None:
            mesh = make_expert_mesh(moe, world, ranks, cuda=self._cuda, sharing=spread.sharing)
        else:
            per_node = count_node_ranks(moe.ranks_per_node or ranks * spread.sharing, ranks, size, spread.sharing)
            mesh = make_dry_run_mesh(ranks, per_node, size // (ranks * spread.sharing), spread.note, spread.sharing)
        # on one node, or with one rank per node, one of the two hops has nothing to send
        two_levels = moe.all_to_all == "2dh" and mesh.nodes > 1 and mesh.devices > 1
        self.layout = replace(self.layout, spread=ranks, hops=2 if two_levels else 1, copies=mesh.copies)
        return mesh

    @contextmanager
    def offloading(self, world: World) -> Iterator[None]:
        """Keep the experts of layers that the body builds where the configuration says. InputError without the wing."""
        settings = self._training.moe.offload
        if settings is None:
            yield
            return
        if self.config.compile:
            raise InputError(
                "compile: torch's compiler cannot follow hyperparameters.moe.offload: leave one of them out"
            )
        make = load_offload("experts", "hyperparameters.moe.offload")
        self._keeper = make(settings, world, self.config.gradient_accumulation_steps)
        token = KEEPER.set(self._keeper)
        try:
            yield
        finally:
            KEEPER.reset(token)

    def tokens_of_layers(self, model: HasMoELayers) -> Sequence[int]:
        """Return the tokens of one sample in each MoE layer, in the order of `moe_layers`."""
        raise NotImplementedError

    def expert_layers(self, model: nn.Module) -> Sequence[ExpertLayer]:
        """List the MoE layers. Of an expert that ranks share, ``parameters`` are this rank's."""
        layers = cast(HasMoELayers, model).moe_layers()
        spread = self.layout.spread
        rows = self.layout.samples * spread  # samples of all ranks that share the experts
        # Where FSDP2 shards them, a rank holds fewer experts than it computes: each held one serves the more tokens.
        computed = {name: max(1, layer.config.experts // spread) for name, layer in layers.items()}
        return [
            ExpertLayer(
                name,
                experts := len(layer.experts.up_EHD),
                sum(parameter.numel() for parameter in layer.experts.parameters()) // experts,
                rows
                * self.layout.computed_rows(layer.config, tokens)
                / layer.config.experts
                * computed[name]
                / experts,
            )
            for (name, layer), tokens in zip(
                layers.items(), self.tokens_of_layers(cast(HasMoELayers, model)), strict=True
            )
        ]

    def choose(self, model: nn.Module, chooser: ChooserProtocol) -> None:
        """Choose the back end of MoE layers that say ``auto``."""
        dtype = torch.bfloat16 if self.config.precision == "bfloat16" else torch.float32
        experts = cast(HasMoELayers, model)
        for layer, tokens in zip(experts.moe_layers().values(), self.tokens_of_layers(experts), strict=True):
            if layer.config.backend == "auto":
                rows = self.layout.samples * self.layout.computed_rows(layer.config, tokens)
                shape = ExpertShape.of(layer.config, layer.width, rows, dtype, self.layout.spread)
                layer.backend = choose_backend(chooser, shape)

    def find_graph_problem(self, model: nn.Module) -> str | None:
        """Return why a layer of experts cannot be captured in a graph. None if all can."""
        layers, bfloat16 = cast(HasMoELayers, model).moe_layers().values(), self.config.precision == "bfloat16"
        return next(filter(None, (layer.find_graph_problem(bfloat16=bfloat16) for layer in layers)), None)

    def watch(self, model: HasMoELayers) -> None:
        """Measure the MoE layers of a model, if instrumentation is on, and keep torch's compiler out of them."""
        if self.config.instrumentation:
            clock = CudaClock() if self._cuda else HostClock()
            self._monitor = MoEMonitor(model.moe_layers(), clock, self.spread.sharing)
        if self.config.compile:
            for layer in model.moe_layers().values():
                # The rows of each expert are numbers of the host in some back ends: other code in every step.
                layer.forward = torch.compiler.disable(layer.forward)  # type: ignore[method-assign, no-untyped-call]

    def tune_once(self, model: nn.Module, tokens: int) -> None:
        """Tune the layers before the first training step if ``autotune`` is set and experts are spread over ranks."""
        spread = self.layout.spread > 1 and self.spread.note is None
        if self._training.moe.autotune and self._tuner is None and spread and model.training:
            self._tuner = run_autotuner(model, tokens=tokens)

    def adamw(
        self,
        model: HasMoELayers,
        decayed: Sequence[nn.Parameter],
        others: Sequence[nn.Parameter],
        clip_norm: float | None,
    ) -> Optimization:
        """Build AdamW with the config's schedule. With balance ``bias`` each step also moves the selection bias."""
        training = self._training
        groups = [{"params": decayed, "weight_decay": training.weight_decay}, {"params": others, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=training.learning_rate, betas=training.adam_betas, fused=True)
        layers = list(model.moe_layers().values())
        if self._keeper is not None:
            self._keeper.follow(optimizer)
        if layers and training.moe.balance == "bias":
            note, size, everyone = self.spread.note, self.spread.size, self.spread.replicas
            if everyone is not None and size == 1:  # one rank has this stage of a pipeline
                everyone = DryRunGroup("all", 1, lambda *_: None)
            if note is not None and size > 1:
                everyone = DryRunGroup("all", size, note)
            # the selection bias has no gradient, so the optimizer does not move it
            optimizer.register_step_post_hook(lambda *_: _update_biases(layers, everyone))
        return Optimization(optimizer, lambda step, epoch: learning_rate(training, step), clip_norm=clip_norm)

    def sharded_parameters(self, model: nn.Module) -> Sequence[nn.Parameter]:
        """List the expert parameters, if they are spread over the ranks."""
        return list_expert_parameters(model)

    def share_places(self, model: nn.Module) -> Mapping[str, tuple[Sequence[int], Sequence[int]]]:
        """Say where the experts of this rank lie among all."""
        return locate_expert_shares(model)

    def share_copy(self, model: nn.Module) -> tuple[int, int]:
        """Say which copy of the experts this rank has a share of."""
        return find_expert_copy(model)

    def window_stats(self, world: World) -> dict[str, Any]:
        """Return phases, load and efficiency of the MoE layers since the last call. Every rank calls every window."""
        if self._monitor is None:
            return {}
        stats = self._monitor.flush(world)
        if self._keeper is not None:
            stats["offload"] = self._keeper.flush(world)
        if self._tuner is not None:
            stats["autotuned"] = [decision.event() for decision in self._tuner.decisions.values()]
        return stats

    def _layout(self, ranks: int) -> Layout:
        return Layout(self.config.global_batch_size / self.config.gradient_accumulation_steps / ranks)

    @property
    def element_bytes(self) -> int:
        """Return the bytes of one activation value."""
        return 2 if self.config.precision == "bfloat16" else 4

    @property
    def _cuda(self) -> bool:
        return self.config.device != "cpu" and torch.cuda.is_available()


def _update_biases(layers: Sequence[MoELayer], everyone: DryRunGroup | None) -> None:
    for layer in layers:
        layer.update_bias(everyone)
