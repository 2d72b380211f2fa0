"""Create the bucket of asynchronous requests, unless it exists. Ends with an error while the store is not ready."""

import boto3

s3 = boto3.client("s3")
if "torchmoor" not in {bucket["Name"] for bucket in s3.list_buckets()["Buckets"]}:
    s3.create_bucket(Bucket="torchmoor")
