"""Use NVIDIA's client of the open inference protocol; run by .venv-clients: triton_http.py HOST:PORT MODEL.

Prints the results as one line of JSON.
"""

import json
import sys

import numpy
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException

ROWS = numpy.array([[1.5, -2.0, 3.25], [0.1, 0.2, 0.3]], dtype=numpy.float32)


def refusal(call):
    try:
        call()
    except InferenceServerException as error:
        return [error.status(), error.message()]


def main(address, model):
    client = triton.InferenceServerClient(address, network_timeout=120.0, connection_timeout=30.0)

    def infer(is_raw, outputs):
        given = triton.InferInput("INPUT__0", list(ROWS.shape), "FP32")
        given.set_data_from_numpy(ROWS, binary_data=is_raw)
        answer = client.infer(model, [given], outputs=outputs, request_id="mine")
        described = answer.get_response()
        return {
            "values": answer.as_numpy("OUTPUT__0").tolist(),
            "is_raw": "data" not in described["outputs"][0],
            "id": described["id"],
            "model": described["model_name"],
        }

    plain = [triton.InferRequestedOutput("OUTPUT__0", binary_data=False)]
    told = {
        "live": client.is_server_live(),
        "ready": client.is_server_ready(),
        "server": client.get_server_metadata()["extensions"],
        "model_ready": client.is_model_ready(model),
        "unknown_ready": client.is_model_ready("none.tar.gz"),
        "metadata": client.get_model_metadata(model),
        "raw": infer(True, None),
        "json": infer(False, plain),
        "unknown": refusal(lambda: client.get_model_metadata("none.tar.gz")),
        "wrong": refusal(
            lambda: client.infer(model, [triton.InferInput("X", [1, 3], "FP32").set_data_from_numpy(ROWS[:1])])
        ),
        "version": client.get_model_metadata(model, "1"),
        "other_version": refusal(lambda: client.get_model_metadata(model, "2")),
    }
    print(json.dumps(told))


main(*sys.argv[1:])
