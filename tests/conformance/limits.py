"""What can't work, each with the exception and the sentence that say so. Nothing is skipped."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from hf_kvtransfer import CacheUseError
from hf_kvtransfer._compat import CHUNKED_PREFILL_SKIPS_CACHED, TAKES_NEW_TOKENS_ONLY

from .settings import Setting


@dataclass(frozen=True)
class Limit:
    """
    Args:
        ways (`frozenset[str]`): the ways that it concerns.
        error (`type` or `tuple[type, ...]`): what is raised.
        sentence (`str`): a pattern of its message.
        natively (`str`):
            What transformers does with a cache of its own: `"alike"`, it raises the same, or `"wrong"`, it gives other
            logits or an error about something else, which is why this package refuses.
        applies (`Callable`): to which settings.
    """

    ways: frozenset[str]
    error: type[Exception] | tuple[type[Exception], ...]
    sentence: str
    natively: Literal["alike", "wrong"]
    applies: Callable[[Setting], bool] = lambda setting: True


LIMITS = [
    # These modes have left transformers for repositories of code on the Hub.
    Limit(
        frozenset({"contrastive_search", "dola", "group_beams", "constrained_beams"}),
        ValueError,
        "requires `trust_remote_code=True`",
        natively="alike",
    ),
]
_WHOLE = frozenset({"assisted_decoding_with_the_whole_prompt", "prompt_lookup_with_the_whole_prompt"})
if TAKES_NEW_TOKENS_ONLY:
    LIMITS.append(
        Limit(
            _WHOLE,
            CacheUseError,
            "Assisted and prompt look-up decoding do not skip what is cached",
            natively="wrong",
        )
    )
else:
    LIMITS += [
        # Drafts that are rejected can't be taken back once a window has dropped earlier tokens.
        Limit(
            _WHOLE,
            (ValueError, CacheUseError),
            "Cannot `crop`|to crop it",
            natively="alike",
            applies=lambda setting: setting.is_sliding,
        ),
        Limit(
            frozenset(
                {
                    "assisted_decoding",
                    "prompt_lookup",
                    "new_ids_with_the_whole_mask",
                    "new_ids_with_left_padding",
                    "chunked_prefill_of_new_ids",
                    "several_turns_of_new_ids",
                }
            ),
            CacheUseError,
            "can't go on from new tokens alone",
            natively="wrong",
        ),
        Limit(
            frozenset({"the_new_keyword"}),
            ValueError,
            r"`model_kwargs` are not used by the model: \['cache'\]",
            natively="alike",
        ),
        # Without a mask these releases make one that is a token too long.
        Limit(
            frozenset({"forward_in_blocks"}),
            RuntimeError,
            "The size of tensor a .* must match the size of tensor b",
            natively="alike",
            applies=lambda setting: setting.model.config.model_type == "stablelm",
        ),
    ]
if not CHUNKED_PREFILL_SKIPS_CACHED:
    LIMITS.append(Limit(frozenset({"chunked_prefill"}), CacheUseError, "reads again what is cached", natively="wrong"))


def limit_of(way: str, setting: Setting) -> Limit | None:
    """The limitation of a way on a setting, or `None` where it must work."""
    found = [limit for limit in LIMITS if way in limit.ways and limit.applies(setting)]
    assert len(found) < 2
    return found[0] if found else None
