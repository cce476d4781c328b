"""Every dimension letter of the project, once.

A name's suffix spells its shape: ``hidden_BTD`` is batch by tokens by hidden. One letter means one count
everywhere, in array names, jaxtyping annotations and the sharding table.
"""

DIMS: dict[str, str] = {
    "A": "anchors: prefixes whose states are asked for, per sequence",
    "B": "batch: sequences",
    "C": "channels of the causal convolution: q, k and v of a Gated DeltaNet layer side by side",
    "D": "hidden width of the residual stream",
    "E": "taps: target layers whose residual stream the drafter sees",
    "F": "width of the MLP",
    "G": "key/value heads of attention",
    "H": "width of one attention head",
    "I": "columns of a fused input projection",
    "J": "rank of the state reader",
    "K": "key heads of a Gated DeltaNet layer",
    "L": "logit classes that a stop table or a threshold list names",
    "M": "memory (value) heads of a Gated DeltaNet layer; each holds one state",
    "N": "new tokens: the slots of an output buffer",
    "O": "rows of an output projection",
    "P": "proposals of one draft block",
    "Q": "query heads of attention",
    "R": "rank of the Markov head",
    "S": "slots of a key/value buffer",
    "T": "tokens of one pass",
    "U": "width of the reader's bottleneck",
    "V": "vocabulary",
    "W": "taps of the causal convolution (window), and rows of a conv history",
    "X": "key width of a recurrent state",
    "Y": "value width of a recurrent state",
    "Z": "state pairs (layer, memory head) that a reader reads",
}
