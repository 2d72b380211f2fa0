"""Places of checkpoints besides directories: S3 prefixes and models of the Hugging Face hub; and their variables."""

import re

from torchmoor.wire.handler_variables import MODEL_PATH

S3 = "s3://"
HUB = "hf://"
HUB_NAME = re.compile(r"\w[\w.-]{0,95}(/\w[\w.-]{0,95})?", re.ASCII)  # owner/name, or a name alone
HUB_FORM = f"{HUB}owner/name, with @revision for a branch, tag or commit"
_REVISION = re.compile(r"\w[\w./+-]{0,254}", re.ASCII)

PROPERTIES = "serving.properties"  # LMI's file of settings, which may name a checkpoint
PROPERTIES_FOLDER = "TORCHMOOR_PROPERTIES_FOLDER"  # where it is; set by the launcher
CHECKPOINT_VARIABLES = (MODEL_PATH, "HF_MODEL_ID", "OPTION_MODEL_ID")  # name the chat handler's checkpoint


def split_hub_place(place: str) -> tuple[str, str]:
    """Return the name and the revision of hf://owner/name@revision; the revision is "" if the place has none.

    Raises ValueError if the place does not have this form.
    """
    name, at, revision = place.removeprefix(HUB).partition("@")
    if not HUB_NAME.fullmatch(name) or (at and not _REVISION.fullmatch(revision)):
        raise ValueError(f"{place} must be {HUB_FORM}")
    return name, revision


def read_model_id(text: str) -> str:
    """Return the place that HF_MODEL_ID names: a path or a URL as it is, and any other name as a model of the hub.

    Raises ValueError for anything else.
    """
    place = text if "://" in text or text.startswith((".", "/")) else f"{HUB}{text}"
    if "://" in place and not place.startswith((S3, HUB)):
        raise ValueError(f"it must be a directory, {S3}bucket/prefix, owner/name of the hub or {HUB_FORM}")
    if place.startswith(HUB):
        split_hub_place(place)
    return place
