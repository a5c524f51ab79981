"""The wire: identifiers, messages, stream names, codec. The only place where wire types live."""
