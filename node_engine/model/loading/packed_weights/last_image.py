"""Remembers which image of packed weights the last start with the same settings has used."""

import json
import re
from collections.abc import Mapping
from pathlib import Path

from baton.process import log
from node_engine.model.loading.packed_weights.small_files import SmallFiles

_IMAGE_ID = re.compile(rb"[0-9a-f]{32}")


class LastImage:
    """A small file in the folder of cached weights.

    What it says is a guess: the files of the model may have changed since.
    """

    def __init__(self, folder: Path, settings: Mapping[str, object]) -> None:
        """`folder` is that of a WeightCacheFolder, which has checked who owns it."""
        self._files = SmallFiles(folder, ".last", max_bytes=32)
        self._key = json.dumps(settings, sort_keys=True)

    def find_image_id(self) -> str | None:
        file = self._files.read(self._key)
        if file is None or not _IMAGE_ID.fullmatch(file.content):
            return None
        return file.content.decode()

    def save_image_id(self, image_id: str) -> None:
        """Remember the image, unless it is the one that is remembered."""
        if self.find_image_id() == image_id:
            return
        try:
            self._files.write(self._key, image_id.encode())
        except OSError as error:
            log.get_logger("engine").warning(
                "the weights of this start are not remembered",
                folder=str(self._files.folder),
                error=error.strerror,
            )
