"""The names of the peers, for whoever must know them before torch is imported."""

from tracefuse.errors import OptionError
from tracefuse.optimizers.errors import did_you_mean

COMPILE = "torch.compile"
MODES = ("reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
PEERS = ("eager", COMPILE, *(f"{COMPILE} {mode}" for mode in MODES))


def peer_name(text: str) -> str:
    """The full name of a peer, which may be given by its mode alone. Raises `OptionError` for what is none."""
    name = f"{COMPILE} {text}" if text in MODES else text
    if name not in PEERS:
        raise OptionError(
            f"there is no peer {text!r}: {did_you_mean(text, (*PEERS, *MODES))}choose from {', '.join(PEERS)}"
        )
    return name
