"""A data set class of a user's, in a module of the user's, as a dataset.yaml names it."""

from typing import Any

from megatron.energon import DefaultDecoderWebdatasetFactory, Sample, edataclass


@edataclass
class ChatSample(Sample):
    """A conversation about images."""

    conversation: str
    images: Any = None


class ChatWebdataset(DefaultDecoderWebdatasetFactory[ChatSample]):
    """Reads the text of a conversation from the part that its field map names."""

    __sample_type__ = ChatSample

    def load_sample(self, sample):
        made = super().load_sample(sample)
        made.conversation = made.conversation.upper()
        return made
