// What a golden run must satisfy, on whatever backend the model is on. Failures are gtest's.
#pragma once

#include <vector>

#include "golden/golden.h"

namespace fathom::golden {

// Reference numerics against the reference outputs, for every way of cutting a prompt.
// `flips_allowed`: share of logit rows that may exceed the bound because a float difference flipped
// one of many nearly equal indexer scores. FATHOM_LONG=1 also cuts the two longest prompts into the
// smallest chunks.
void CheckReference(Model& model, double flips_allowed);

// Product numerics give the reference's greedy text with each of the three cache formats.
void CheckGreedyText(Model& model);

// Cache rows, states and logits of `ids` have the same bits for every chunk size and batch.
void CheckChunkIndependence(Model& model, const std::vector<TokenId>& ids);

// What a sequence gives does not depend on what its blocks and slot held before.
void CheckStaleMemory(Model& model);

}  // namespace fathom::golden
