"""Settings of images: `handler.intake`."""

from pydantic import Field

from handlers.settings.group import GIB, MIB, Count, HandlerGroup, Positive, Size, Switch, Texts


class IntakeSettings(HandlerGroup, title="intake"):
    """Images: where they may come from, and how large they may be."""

    max_bytes: Count = Field(20 * MIB, description="Size limit of an encoded image.")
    max_pixels: Count = Field(50_000_000, description="Pixels of an image, checked before it is decoded.")
    max_aspect_ratio: Positive = Field(
        100.0,
        description="Longest side relative to the shortest, which the preprocessor scales up to a fixed size.",
    )
    allowed_hosts: Texts = Field(
        (), description="Private host names, addresses or CIDR blocks from which images may be downloaded."
    )
    allow_urls: Switch = Field(
        True, description="Download images from addresses that clients send; false: they must send the image itself."
    )
    connect_timeout_s: Positive = Field(3.0, description="Time-out of a connection to an image's address.")
    read_timeout_s: Positive = Field(10.0, description="Longest time without a byte during a download.")
    total_timeout_s: Positive = Field(20.0, description="Longest time of one download.")
    max_redirects: Size = Field(3, description="Redirects that a download follows.")
    num_threads: Count = Field(8, description="Threads that decode images and rebuild or close sessions.")
    fetch_threads: Count = Field(
        16, description="Threads for downloads of images; one caller has at most half of them."
    )
    fetching_timeout_s: Positive = Field(
        40.0,
        description="Time from a request's arrival to the end of its downloads, at most two thirds of the request's "
        "own time. Keep it below the proxy's timeouts.model_timeout_s.",
    )
    decoding_bytes: Count = Field(
        2 * GIB,
        description="Memory per worker for images that are decoded and scaled: 14 to 18 bytes per pixel, or 4 to 8 for "
        "one that is reduced (WebP: 18); an image that needs more is refused. The pixels of images that wait to be "
        "classified count, too.",
    )
    decoding_timeout_s: Positive = Field(
        10.0, description="How long an image waits for its share of decoding_bytes; then it is refused with 507."
    )
    allowed_buckets: Texts = Field(
        (), description="Buckets, as bucket or bucket/prefix, from which clients may name images as s3:// addresses."
    )
    large_bytes: Count = Field(
        GIB, description="Size limit of an image from S3. One above max_bytes is scaled down on arrival, one at a time."
    )
    large_pixels: Count = Field(
        400_000_000,
        description="Pixels of such an image when it is decoded: 4 bytes of memory per pixel, 8 with transparency, "
        "within decoding_bytes.",
    )
    scaled_pixels: Count = Field(
        6_000_000, description="Pixels to which such an image is scaled, within max_pixels and max_bytes."
    )
    s3_timeout_s: Positive = Field(300.0, description="Time-out for downloading and scaling an image from S3.")
