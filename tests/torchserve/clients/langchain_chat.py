"""Use ChatSagemakerEndpoint as a user does; run by .venv-clients: langchain_chat.py RUNTIME_URL PICTURE.

Prints the results as one line of JSON.
"""

import asyncio
import json
import sys
from pathlib import Path

from langchain_core.messages import HumanMessage

from torchmoor.clients.errors import EndpointError
from torchmoor.clients.langchain import ChatSagemakerEndpoint
from torchmoor.clients.runtime import image_reference


def refusal(call):
    try:
        call()
    except EndpointError as error:
        return f"{error.code}: {error}"
    return "no error"


async def streamed(model, messages):
    return [chunk.text async for chunk in model.astream(messages)]


def main(address, picture):
    model = ChatSagemakerEndpoint(endpoint_name="llava", endpoint_url=address, max_tokens=32)
    image = {"type": "image_url", "image_url": {"url": image_reference(Path(picture))}}
    question = HumanMessage([image, {"type": "text", "text": "What color is the circle?"}])
    whole = model.invoke([question])
    told = {
        "whole": whole.text,
        "usage": whole.usage_metadata,
        "pieces": [chunk.text for chunk in model.stream([question])],
        "apieces": asyncio.run(streamed(model, [question])),
        "stopped": model.invoke([question], stop=["circle"]).text,
        "refused": refusal(lambda: model.invoke([question], temperature=-1)),
    }
    with model.open_session([picture]) as chat:
        first = chat.invoke("What color is the circle?")
        history = [HumanMessage("What color is the circle?"), first, HumanMessage("What shape is this?")]
        told["session"] = chat.session_id
        told["asked"] = first.text
        told["more"] = "".join(chunk.text for chunk in chat.stream(history))
        told["usage_in_session"] = first.usage_metadata
    told["closed"] = refusal(lambda: chat.invoke("Still there?"))
    print(json.dumps(told))


main(*sys.argv[1:])
