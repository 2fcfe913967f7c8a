"""What a mapper's configuration says of its accuracy, once its maps are no longer those that this was measured of."""

from ..config import KVMapperConfig
from ..evidence import EVALUATION


CLOSED_FORM = "closed_form"
"""The name under which `scores` of a trained mapper hold those of the maps it began with."""

# How many source layers the maps read was decided by these, and stays so.
_STAYS = ("k_candidates", CLOSED_FORM)


def keep_as_closed_form(config: KVMapperConfig) -> None:
    """
    Puts scores under a name that says whose they are: `scores["closed_form"]` are R² of the maps before training. An
    evaluation is dropped, as that of other weights.

    Args:
        config ([`KVMapperConfig`]): of a mapper whose maps are about to change; changed in place.
    """
    earlier = {name: value for name, value in config.scores.items() if name not in (*_STAYS, EVALUATION)}
    kept = {name: config.scores[name] for name in _STAYS if name in config.scores}
    config.scores = kept | ({CLOSED_FORM: earlier} if earlier else {})
