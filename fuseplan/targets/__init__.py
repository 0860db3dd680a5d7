"""Find the ``costmodel.DeviceSpec`` of the device to plan for, and compile for a device that is not present.

In: a device's name, or nothing for the default device. Out: its ``DeviceSpec`` (``detect``), that of this CPU
with measured rates (``calibrate``), or a compiled program (``compile_only``). Open ``detect`` first.
"""
