"""Whether a file whose export fixed the batch size trains with another: proven by numbers, as a run does."""

from __future__ import annotations

from dataclasses import replace

from onward.errors import OnwardError
from onward.graph.rebatching.passes import NotRebatched
from onward.proposal.model_facts import BatchProof, ModelFacts


def with_batch_proof(model: ModelFacts) -> ModelFacts:
    """The model with what is known of other batch sizes; unchanged where its batch is open or was proven before."""
    if model.fixed_batch is None or model.batch_proof is not None:
        return model
    # With torch, which takes longer to import than most models take to read; few exports fix the batch size.
    from onward.lowering.rebatching_proof import prove_rebatching

    try:
        proof = BatchProof(prove_rebatching(model.path, model.fixed_inputs, model.limits))
    except (NotRebatched, OnwardError) as error:
        proof = BatchProof(None, str(error))
    return replace(model, batch_proof=proof)
