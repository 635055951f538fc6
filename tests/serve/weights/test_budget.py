"""What a pass of a streamed model may take at its most."""

from __future__ import annotations

from phalanx_serve.weights.budget import Computing
from serve.engine.test_engine import built


def test_a_pass_with_fast_numerics_has_room_for_either_form_of_latent_attention() -> None:
    expanded, absorbed = (built(kind).spec for kind in ("latent", "absorbed"))
    exact, fast = (Computing(32, 4, 512, any_form) for any_form in (False, True))
    most = exact.nbytes(absorbed, "float32")
    assert exact.nbytes(expanded, "float32") < most
    assert fast.nbytes(absorbed, "float32") == most
    assert fast.nbytes(expanded, "float32") > exact.nbytes(expanded, "float32")
