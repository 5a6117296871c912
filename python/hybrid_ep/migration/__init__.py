"""Training across datacenters: experts travel between datacenters, compressed, and tokens stay inside.

    plan = ExpertDomains.uniform(ranks=4, datacenters=2)      # or ExpertDomains.from_file("groups.json")
    migration = ExpertMigration(plan, num_experts=16)
    model = ...                                               # with HybridMoELayer(migration, ...) for its MoE layers
    for batch in batches:
        optimizer.zero_grad()
        loss(model, batch).backward()                         # a layer's gradients leave as soon as they are complete
        migration.reduce_gradients(model)
        optimizer.step()
        migration.publish()                                   # new weights leave

docs/migration.md describes the runtime.

plan      ExpertDomains: which rank gathers from which, and which ranks exchange tokens
runtime   ExpertMigration: publish, gather, gradients, checkpoints
layer     HybridMoELayer, and its experts
guard     LossGuard: complete weights for the replicas when the loss rises
carrier   messages between the ranks of an expert domain, or between all ranks
dense     the reduction of dense gradients
"""

from __future__ import annotations

from .guard import LossGuard
from .layer import HybridExperts, HybridMoELayer
from .plan import ExpertDomains
from .runtime import ExpertMigration

__all__ = ["ExpertDomains", "ExpertMigration", "HybridExperts", "HybridMoELayer", "LossGuard"]
