"""The two figures that retention hides, for NLL (lower is better) and for accuracy alike."""


def gap_recovered(transferred: float, source_alone: float, native: float) -> float:
    """
    How much of what the target is better at than the source survives the transfer:
    `(transferred − source alone) / (native − source alone)`. 1 is native quality, 0 no better than the source.

    Args:
        transferred (`float`): the figure of the target on a converted cache; any one unit, the same in all three.
        source_alone (`float`): the figure of the source model.
        native (`float`): the figure of the target on its own cache.

    Returns:
        `float`: `nan` when native and source are alike, so that there is no gap.
    """
    gap = native - source_alone
    return (transferred - source_alone) / gap if gap else float("nan")


def context_value_kept(transferred: float, no_context: float, native: float) -> float:
    """
    How much of what the context is worth to the target survives the transfer:
    `(no context − transferred) / (no context − native)`. 1 is native quality, 0 as if nothing had been read.

    Args:
        transferred (`float`): the figure of the target on a converted cache; any one unit, the same in all three.
        no_context (`float`): the figure of the target without the context.
        native (`float`): the figure of the target on its own cache.

    Returns:
        `float`: `nan` when the context is worth nothing to the target.
    """
    value = no_context - native
    return (no_context - transferred) / value if value else float("nan")


def normalised_retention(transferred: float, chance: float, native: float) -> float:
    """
    How much of what the target knows above guessing survives the transfer:
    `(transferred − chance) / (native − chance)` (arXiv 2608.03893, floor-normalised retention). 1 is native quality, 0
    no better than guessing.

    Args:
        transferred (`float`): accuracy of the target on a converted cache.
        chance (`float`): what guessing reaches, in the same unit: 0.25 for four choices.
        native (`float`): accuracy of the target on its own cache.

    Returns:
        `float`: `nan` when native is no better than guessing.
    """
    worth = native - chance
    return (transferred - chance) / worth if worth else float("nan")
