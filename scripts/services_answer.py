"""Checks that both servers respond, and creates the bucket and the container `elmo-test`."""

import base64
import datetime
import hashlib
import hmac
import os
import sys
import urllib.error
import urllib.request

NAME = "elmo-test"


def main() -> None:
    put(f"{os.environ['ELMO_TEST_S3_ENDPOINT']}/{NAME}", {})
    account = os.environ["AZURE_STORAGE_ACCOUNT_NAME"]
    azure = f"{os.environ['ELMO_TEST_AZURE_ENDPOINT']}/{NAME}?restype=container"
    put(azure, azure_headers(account, os.environ["AZURE_STORAGE_ACCOUNT_KEY"]))


def azure_headers(account: str, key: str) -> dict:
    """Headers with Shared Key authorisation for creating the container, as documented by Azure."""
    date = datetime.datetime.now(datetime.timezone.utc).strftime("%a, %d %b %Y %H:%M:%S GMT")
    headers = {"x-ms-date": date, "x-ms-version": "2021-12-02"}
    canonical_headers = "".join(f"{name}:{value}\n" for name, value in sorted(headers.items()))
    # The account appears twice: as the owner, and as the first segment of Azurite's path.
    resource = f"/{account}/{account}/{NAME}\nrestype:container"
    to_sign = "PUT" + "\n" * 12 + canonical_headers + resource
    digest = hmac.new(base64.b64decode(key), to_sign.encode(), hashlib.sha256).digest()
    return {**headers, "Authorization": f"SharedKey {account}:{base64.b64encode(digest).decode()}"}


def put(url: str, headers: dict) -> None:
    # Without data, urllib adds no Content-Type, which would have to be signed.
    request = urllib.request.Request(url, method="PUT", headers={**headers, "Content-Length": "0"})
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            assert answer.status in (200, 201), f"{url} answered {answer.status}"
    except urllib.error.HTTPError as error:
        sys.exit(f"error: {url} answered {error.code}: {error.read()[:500]!r}")


if __name__ == "__main__":
    main()
